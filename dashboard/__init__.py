"""The notebook dashboard of MegaTrain."""
