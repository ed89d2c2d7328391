"""Fine-tuning: text classification by a pretrained encoder.

This package is an application of the library, as `tfwd.lm` is. The files follow the way of the
data: `examples` (files of texts and labels), `manual` (the text that comes with Python),
`published` (the pretrained folder), `vocabulary` (classes, tokens and numbers), `batches`,
`config`, `model`, `schedule`, `step`, `scores`, `evaluation`, `trainer`, `finish` (the report).
`program` is what it gives to `tfwd.runs`; `train`, `tune` and `classify` are the console scripts.
Nothing is imported here, so that a program can set up logging before TensorFlow is loaded.
"""
