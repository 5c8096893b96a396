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
JAX_FILES = frozenset(
    """ad.py api.py api_util.py array.py array_creation.py array_methods.py batching.py
    compilation_cache.py compiler.py core.py custom_derivatives.py dispatch.py dtypes.py lax.py
    lax_numpy.py linear_util.py loops.py mesh.py mlir.py named_sharding.py partial_eval.py pjit.py
    pmap.py prng.py profiler.py pxla.py reductions.py shard_map.py sharding.py sharding_impls.py
    slicing.py source_info_util.py stages.py traceback_util.py tree_util.py ufuncs.py util.py
    xla_bridge.py xla_metadata_lib.py""".split()  # noqa: SIM905
)
"""Files of JAX that are in most stacks. Its profiler writes names without folders, so a file of the
user's that is called like one of them is taken for JAX's."""
