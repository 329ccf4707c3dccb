"""How the tables are to be read."""

PARAGRAPHS = (
    "# Results",
    "Made by `make results` from the records under `benchmarks/results/`, which hold settings, "
    "seeds, versions and machine; a test fails when this file is not what they say. CPU means two "
    "cores of an AMD EPYC virtual machine, GPU one NVIDIA H200. Where a goal was missed, it says "
    "so.",
    "**How to read.** *Line-up*: does the reconstruction resemble the true picture more than the "
    "others of its class in the line-up, each put through the victim's own draws of crop, flip and "
    "policy? Nothing but the picture can win it. Rows beside an attack: the best *guess* without a "
    "gradient, chosen on public images with all that the attacker knows; a *sham*, the same attack "
    "on updates of other images; *ceilings*, what the line-up can reach. PSNR and SSIM are against "
    "the images that the client used. Intervals are exact 95%. By chance one in N is won, over "
    "images drawn at random; for a run of consecutive images, as the papers have it, a guess may "
    "win more or fewer, whoever makes it: read their rates against the guess beside them.",
    "**Tables marked † were measured before the line-up was in**: they show PSNR and SSIM only. "
    'What they said of policies by "dB over blind" or "identified among 1,000" is withdrawn: those '
    "guesses did not know the policy, and that identification could be won by the label or by a "
    "policy's draws. They are being measured again.",
)


def section() -> str:
    return "\n\n".join(PARAGRAPHS)
