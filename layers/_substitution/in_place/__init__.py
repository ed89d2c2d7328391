"""Parametrizations of a layer's weights that leave the layer itself in place.

An `InPlace` (`parametrization_in_place`) has the parametrizations of one target. A hook
(`method_hooks`) replaces the `call` of each layer of the target that has or contains a parametrized
weight. The hook holds a `Link` (`layer_call`). `installation` adds and removes hooks and links.

In training, the outermost hooked layer takes a call number (`running_calls`). All weights of this
call use this number, whichever layer reads them and however often. So a layer that a loop calls at
each time step has one mask for all time steps.

There are two kinds of hooked layers:

- An effective layer runs on effective weights, like the layer in a `Parametrized` wrapper. It has a
  parametrized weight of its own, or is a recurrent layer or a Keras wrapper. Its call computes only
  this layer's effective weights. Backward computes only these weights again.
- A container only passes the call number on. It may read a weight of a layer inside it without
  calling that layer, for example a table for tied logits. Such a read returns the effective weight.
"""
