"""Packages that are known by name, where only that tells installed code from the user's.

The profiler cuts the entries of ``sys.path`` off the front of a file's name, so that a frame of an
installed package starts with the package's own name.
"""

from __future__ import annotations

TORCH = frozenset({"torch", "advisor", "numpy", "triton"})
"""PyTorch, and what stands for it in a stack …"""
LIBRARIES = frozenset(
    """accelerate aiohttp apex bitsandbytes composer cv2 cupy dask datasets deepspeed diffusers
    einops evaluate fairscale fastai flash_attn flashinfer flax fsspec hydra huggingface_hub
    ignite jax keras kornia lightning lightning_fabric lightning_utilities lightly llvmlite
    matplotlib megatron mlflow mmcv mmengine monai numba omegaconf onnx onnxruntime open_clip
    optree optuna packaging pandas peft PIL polars psutil pyarrow pydantic pytest pytorch_lightning
    ray requests rich safetensors scipy sentence_transformers skimage sklearn sympy tensorboard
    tensorboardX tensordict tensorflow timm tokenizers torch_geometric torch_scatter torch_sparse
    torchao torchaudio torchdata torcheval torchmetrics torchrec torchtext torchvision tqdm
    transformer_engine transformers trl ultralytics wandb webdataset xformers yaml""".split()  # noqa: SIM905 - a name a line would be most of the file
)
"""… and libraries that a user installed."""
