"""The library of TensorFlow ops that send tensors from rank to rank: its C++ source, its compilation, its loading."""
