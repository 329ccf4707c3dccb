"""Policies that were published, and what they cost in accuracy there."""

from typing import NamedTuple

GAO = (
    "Gao et al. 2021, Privacy-preserving Collaborative Learning with Automatic Transformation "
    "Search"
)


class PublishedPolicy(NamedTuple):
    """A policy, the images and model it was searched for, and what it cost there."""

    policy: str
    use: str
    cost: str
    paper: str = GAO


CIFAR, FASHION = "CIFAR-100 and images like it", "Fashion-MNIST and images like it"
PUBLISHED = (
    PublishedPolicy("3-1-7", f"{CIFAR}, resnet20-4", "accuracy 76.9% to 70.6%"),
    PublishedPolicy("43-18-18", f"{CIFAR}, resnet20-4", "accuracy 76.9% to 77.3%"),
    PublishedPolicy("3-1-7+43-18-18", f"{CIFAR}, resnet20-4", "accuracy 76.9% to 77.9%"),
    PublishedPolicy("21-13-3", f"{CIFAR}, convnet", "accuracy 70.1% to 67.0%"),
    PublishedPolicy("7-4-15", f"{CIFAR}, convnet", "accuracy 70.1% to 69.7%"),
    PublishedPolicy("7-4-15+21-13-3", f"{CIFAR}, convnet", "accuracy 70.1% to 70.3%"),
    PublishedPolicy("19-15-45", f"{FASHION}, resnet20-4", "accuracy 95.0% to 91.3%"),
    PublishedPolicy("2-43-21", f"{FASHION}, resnet20-4", "accuracy 95.0% to 89.4%"),
    PublishedPolicy("2-43-21+19-15-45", f"{FASHION}, resnet20-4", "accuracy 95.0% to 92.2%"),
    PublishedPolicy("42-28-42", f"{FASHION}, convnet", "accuracy 94.3% to 91.3%"),
    PublishedPolicy("14-48-48", f"{FASHION}, convnet", "accuracy 94.3% to 90.6%"),
    PublishedPolicy("14-48-48+42-28-42", f"{FASHION}, convnet", "accuracy 94.3% to 91.4%"),
)
"""Their accuracies are those that the paper prints; with A+B each image gets one of the two."""
