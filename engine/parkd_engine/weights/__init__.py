"""Weights of linear layers as kinds: codes and scales in place of numbers.

    kinds       what codes and scales there are, their shapes, and the numbers that they mean
    linear      a linear layer over codes, in place of `nn.Linear`, and its products
    experts     routed experts over codes, in place of the library's module
    tiles       int4 codes in another order, for torch's product on CPUs
    rounding    numbers -> codes, to the nearest
    schemes     which layers of a model are quantised and how, from its configuration alone
    published   the tensors of published formats -> the kinds

    published tensors -> one layout for each kind -> products: forward passes of the library, kernels for decoding

A linear layer in full precision stays an `nn.Linear`. Whoever counts, moves or multiplies weights treats both alike.
"""
