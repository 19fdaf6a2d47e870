"""`python -m raytrain_app` is the command `raytrain`."""

from raytrain_app.cli import main

if __name__ == "__main__":
    main()
