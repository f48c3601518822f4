"""Trace a loss, differentiate its stages and trace the optimizer: TensorFlow in, IR out."""
