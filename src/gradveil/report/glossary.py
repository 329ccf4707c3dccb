"""The words of the page, explained to a reader who has never seen an audit."""

from gradveil.report.markup import Html, element, joined

GLOSSARY = {
    "Data reconstruction": "An attack that rebuilds training data from what is shared of a model "
    "(NIST AI 100-2). Here: pictures from the updates of a client.",
    "Update": "What a client sends to the server in place of its pictures: a gradient, or the "
    "change of its weights after some steps of training.",
    "Line-up": "The true picture among others of its class. The reconstruction is compared with "
    "all of them.",
    "Rank 1, or identified": "In its line-up the reconstruction resembles the true picture most. "
    "By luck this happens once in as many pictures as the line-up has.",
    "Top 5": "Pictures whose rank in their line-up is 5 or better.",
    "Mean percentile": "The mean rank as a share of the line-up: with 20 pictures 5% is rank 1 "
    "everywhere, and luck gives about 52%.",
    "p": "How often luck alone would give so many pictures of rank 1, or more.",
    "95% interval": "The shares that these counts leave plausible. With few images it is wide.",
    "Blind guess": "A picture made without any update, such as the mean of public pictures of the "
    "class. What it scores costs an attacker nothing.",
    "dB over blind": "How much closer the reconstruction is than the blind guess. Above 0 the "
    "update gave something away.",
    "No better than blind": "No test tells the attack from a blind guess, after a correction for "
    "all tests of the audit (Holm). It is no proof that nothing leaks.",
    "Too few to tell": "Even if every image had been recognized, so few could not show it.",
    "Sham": "The strongest attack on updates of other images: what it finds without the victim's "
    "update.",
    "Positive control": "The same attack on an easy, untrained model, where it is known to work. "
    "If it is no better than blind there, a low score elsewhere says nothing.",
    "Ceiling": "What the line-up would give to the true picture with noise of the attack's error, "
    "clipped, or to a ranking of the candidates by their gradients.",
    "Bar": "The class mean of public pictures, changed by the victim's own draws of the defense.",
    "Original and used": "The client's picture, and that picture after a defense changed it. "
    "Attacks are compared with both where they differ.",
    "PSNR": "Closeness of two pictures in dB; higher is closer. Below the blind guess it shows "
    "nothing.",
    "SSIM": "Likeness of structure, 1 for equal pictures.",
    "Certificate": "A bound on the share of all such pictures that these attacks would reach, from "
    "the count among those attacked.",
    "GradSim": "The cosine of the gradients of two pictures for one label; 1 where they are alike.",
    "Accuracy": "Share of test images that the audited weights classify correctly; with * the "
    "model was trained under another defense, or its file does not say under which.",
}


def glossary_section() -> Html:
    """Return the glossary as a list of terms."""
    parts = [
        joined([element("dt", term), element("dd", words)]) for term, words in GLOSSARY.items()
    ]
    return element("dl", *parts, class_="glossary")
