"""The simulator: the costs of a plan's stages, and its schedule executed action by action under them."""
