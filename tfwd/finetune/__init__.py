"""Fine-tuning: text classification with a pretrained encoder.

This package is an application of the library, like `tfwd.lm`. `data` reads labelled texts, numbers
them and makes batches. `pretrained_folder` reads the folder of the pretrained model. `config`,
`model`, `resumable_dropout`, `learning_rate_schedule`, `training_step` and `trainer` define the
training. `evaluation`, `scores`, `confusion_plot` and `final_report` make the report. `program`
combines these for `tfwd.runs`. `commands` has the console scripts. This file imports nothing, so
that a program can set up logging before TensorFlow is loaded.
"""
