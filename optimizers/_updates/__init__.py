"""Helpers of the optimizers: decay rates and rules, repeated rows of sparse gradients, replicas."""
