"""Model folders of published shapes, whose weights nobody has trained."""
