"""Import, export, load into a model."""
