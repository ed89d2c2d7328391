"""Optimizer calls for a custom training loop, the same on either Keras and for tensorflow-addons.

loss = steps.scale_loss(optimizer, loss) if steps.scales_loss(optimizer) else loss
steps.set_learning_rate(optimizer, rate)
steps.apply(optimizer, tape.gradient(loss, variables), variables)
"""

from tfwd._keras import steps

apply = steps.apply
build = steps.build
loss_scale = steps.loss_scale
names = steps.names
optimizer_class = steps.optimizer_class
scale_loss = steps.scale_loss
scales_loss = steps.scales_loss
set_learning_rate = steps.set_learning_rate
with_loss_scale = steps.with_loss_scale
