"""What the file is, and how its tables are to be read."""

BEGINNING = (
    "# Results",
    "Made by `make results` from the records under `benchmarks/results/`, which hold settings, "
    "seeds, versions and machine; a test fails when this file is not what they say. CPU means two "
    "cores of an AMD EPYC virtual machine, GPU one NVIDIA H200. Where a goal was missed, it says "
    "so.",
)
RULES = (
    "**Line-up**: does the reconstruction resemble the true picture more than the others of its "
    "class, each put through the victim's own draws of crop, flip and policy? Nothing but the "
    "picture can win it. *Rank 1* counts the images that win, as k/n with an exact 95% interval. "
    "By chance one in N is won, over images drawn at random. For a run of consecutive images, as "
    "the papers have it, a guess may win more or fewer, whoever makes it: read their rates against "
    "the guess beside them.",
    "**Guess**: the best without a gradient, chosen on public images with all that the attacker "
    "knows. **Bar**: a guess that knows the victim's draws too; no attacker has it.",
    "**Sham**: the same attack on updates of other images. **Ceilings**: what the line-up can "
    "reach. **Positive control**: the same attack where it is known to work.",
    "**PSNR** (dB, mean ± standard deviation over images) and **SSIM** are against the images that "
    "the client used. *Originals* are the images before crop, flip and policy.",
    "**8 px**: in a line-up that finds a picture moved by up to 8 pixels in place of 2, where "
    "records hold it.",
    "**p** are as their table says. A dash means that there is none, or that it is not measured.",
    "**Tables marked †** were measured before the line-up was in: they show PSNR and SSIM only. "
    'What they said of policies by "dB over blind" or "identified among 1,000" is withdrawn. Those '
    "guesses did not know the policy, and that identification could be won by the label or by a "
    "policy's draws.",
)


def beginning() -> str:
    return "\n\n".join(BEGINNING)


def rules() -> str:
    return "\n".join(["## How to read", *(f"- {rule}" for rule in RULES)])
