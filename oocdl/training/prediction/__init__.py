"""What a trained network makes of a dataset: losses, metrics, outputs, classes and volumes of labels."""
