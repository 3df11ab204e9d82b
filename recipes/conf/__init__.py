"""The configuration of the recipes; a package, so that an installed wheel finds it."""
