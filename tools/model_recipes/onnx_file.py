"""The weights inside a dynamically quantised ONNX graph, under the names of the modules they came from."""

import numpy as np
import onnx
import torch
from onnx import numpy_helper

QUANTIZED = "_quantized"


def weights(data: bytes) -> dict[str, torch.Tensor]:
    """Every weight of the graph in fp32.

    An embedding or norm keeps its module's name. A linear layer loses it in the export, but the node
    that multiplies by it is called after the module: `/model/layers.0/mlp/up_proj/MatMul_quant`.
    """
    graph = onnx.load_model_from_string(data).graph
    arrays = {tensor.name: tensor for tensor in graph.initializer}

    def array(name: str) -> torch.Tensor:
        return torch.tensor(numpy_helper.to_array(arrays[name]).astype(np.float32))

    def dequantised(name: str) -> torch.Tensor:
        stem = name.removesuffix(QUANTIZED)
        if stem == name:
            return array(name)
        return (array(name) - array(f"{stem}_zero_point")) * array(f"{stem}_scale")

    found = {}
    for name in arrays:
        stem = name.removesuffix(QUANTIZED)
        if stem.endswith(".weight"):
            found[stem] = dequantised(name)
    for node in graph.node:
        if node.op_type == "MatMulInteger" and node.input[1] in arrays:
            module = node.name.removesuffix("/MatMul_quant").strip("/").replace("/", ".")
            found[f"{module}.weight"] = dequantised(node.input[1]).T  # [in, out] in the graph
    return found
