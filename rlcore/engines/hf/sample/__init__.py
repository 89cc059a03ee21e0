"""The sampling wing: decodes with the very weights that are trained."""
