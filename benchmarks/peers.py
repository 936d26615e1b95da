"""CKA between all layers with the packages that compute it: `pip install -r benchmarks/requirements.txt`."""

import contextlib
import io
import warnings

import numpy as np

from layerwave.bench import Peer


def peers() -> list[Peer]:
    """pytorch-cka, ckatorch and torch-cka, each as its documentation calls it. Needs them installed."""
    return [
        Peer("pytorch-cka, float32", "debiased", lambda states: pytorch_cka(states), 1e-3),
        Peer("pytorch-cka, float64", "debiased", lambda states: pytorch_cka(states.astype(np.float64)), 1e-9),
        Peer("ckatorch", "biased", lambda states: ckatorch(states, unbiased=False), 1e-9),
        Peer("ckatorch", "debiased", lambda states: ckatorch(states, unbiased=True), 1e-9),
        Peer("torch-cka, float32", "debiased", torch_cka, 1e-3),
    ]


def pytorch_cka(states: np.ndarray) -> np.ndarray:
    import torch
    from cka import cka_from_features

    features = torch.from_numpy(states)
    with torch.inference_mode():
        return cka_from_features(features, features).numpy()


def ckatorch(states: np.ndarray, unbiased: bool) -> np.ndarray:
    """`cka_base` computes in float64 whatever it gets."""
    import torch
    from ckatorch.core import cka_base

    features = torch.from_numpy(states)
    with torch.inference_mode():
        return np.array([[float(cka_base(X, Y, unbiased=unbiased)) for Y in features] for X in features])


def torch_cka(states: np.ndarray) -> np.ndarray:
    """Two models whose layers give the states, in one batch. In float32: it refuses float64."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset
    from torch_cka import CKA

    class Given(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Identity() for _ in states)

        def forward(self, _):
            for layer, X in zip(self.layers, features, strict=True):
                layer(X)

    features = torch.from_numpy(states)
    names = [f"layers.{layer}" for layer in range(len(states))]
    loader = DataLoader(TensorDataset(torch.zeros(states.shape[1], 1)), batch_size=states.shape[1])
    with torch.inference_mode(), warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        compared = CKA(Given(), Given(), "first", "second", names, names)
        compared.compare(loader, loader)
    return compared.export()["CKA"].numpy()
