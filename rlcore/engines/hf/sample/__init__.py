"""The sampling wing: decodes with the weights that are being trained."""
