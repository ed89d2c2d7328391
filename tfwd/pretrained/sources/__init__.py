"""Files of weights with a common interface: safetensors, `.npz` and TensorFlow checkpoints."""
