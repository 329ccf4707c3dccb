"""`python -m gradveil`."""

from gradveil.cli import main

if __name__ == "__main__":
    main()
