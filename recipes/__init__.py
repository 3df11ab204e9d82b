"""Entry points, one for each thing a user wants: `accelerate launch recipes/NAME.py key=value ...`."""
