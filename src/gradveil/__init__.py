"""What shared gradients give away in collaborative learning, and the defences that stop it."""

__version__ = "0.1.0"
