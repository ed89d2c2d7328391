"""Layers of transformers, with fresh weights or with the weights of published models.

Import them with `from tfwd.layers import transformer as T`.
"""

from tfwd.layers.transformer.attention import Attention, SelfAttention
from tfwd.layers.transformer.bert import Bert
from tfwd.layers.transformer.bimodal_encoder import BiModalEncoder, Connection
from tfwd.layers.transformer.embeddings import Embeddings
from tfwd.layers.transformer.formats.published_layer import mapping
from tfwd.layers.transformer.pooler import Pooler
from tfwd.layers.transformer.relative_positions import RelativePositions
from tfwd.layers.transformer.rms_normalization import RMSNormalization
from tfwd.layers.transformer.t5 import T5
from tfwd.layers.transformer.t5_layer import T5Layer
from tfwd.layers.transformer.t5_stack import T5Stack
from tfwd.layers.transformer.transformer_layer import TransformerLayer
from tfwd.layers.transformer.transformer_stack import TransformerStack

__all__ = [
    "T5",
    "Attention",
    "Bert",
    "BiModalEncoder",
    "Connection",
    "Embeddings",
    "Pooler",
    "RMSNormalization",
    "RelativePositions",
    "SelfAttention",
    "T5Layer",
    "T5Stack",
    "TransformerLayer",
    "TransformerStack",
    "mapping",
]
