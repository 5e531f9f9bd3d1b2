"""``quantizer=checkpoint``: weights as the checkpoint has them, quantized or not.

``methods/`` reads what a checkpoint says of itself (one file for each ``quant_method``) and answers with a
:class:`~engine_plugins.quantizer.checkpoint.scheme.Scheme` for each linear layer; ``layouts/`` knows the tensors a
layer then has, and makes a :class:`~engine.kernels.quantized.QuantizedWeight` of them. Only what reads tensors
imports torch.
"""
