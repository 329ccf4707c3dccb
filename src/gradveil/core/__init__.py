"""Types, errors, seeds and files that every other part needs. Importing it loads no torch."""
