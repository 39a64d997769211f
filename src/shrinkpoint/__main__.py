"""`python -m shrinkpoint` is `shrinkpoint`."""

from shrinkpoint.cli import main

if __name__ == "__main__":
    main()
