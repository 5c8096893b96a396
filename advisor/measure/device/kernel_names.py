"""Kernel names and what they reveal: family, tensor cores, number format, helper or main part.

Each distinct name is read once, with polars' linear-time regular expressions, because names come
from the trace and may be long or hostile."""

import re
from collections.abc import Callable

import numpy as np
import polars as pl

from advisor.core import labels
from advisor.measure.device.families import MATRIX, Family
from advisor.measure.device.shapes import Format
from advisor.measure.host.names import cache_by_name

_COMMUNICATION = (
    r"(?i)nccl|rccl|msccl|nvshmem|multimem|deep_ep(::|_)|(^|:)ep::|userbuffers|lamport"
    r"|cross_device_(reduce|store)|(^|[^m])all_?(reduce|gather|to_?all)|reduce_?scatter"
    r"|quick_?reduce|(inter|intra)_?node(_ll)?::|(^|[:_])(mori_?)?ep_?(dispatch|combine)"
    r"|(^|[:_])(send_?recv|a2a|halo_exchange|nvls)_"
    r"|(^|[:_])(barrier|(put_|wait_)?signal)_kernel"
)
"""NCCL, RCCL, MSCCL++, NVSHMEM, symmetric memory of PyTorch, custom all-reduces of vLLM, SGLang,
TensorRT-LLM, FlashInfer, aiter, Transformer Engine's user buffers, expert parallelism (DeepEP and
what copies its names, mori). Searched in the function's name, not in its template arguments: a GEMM
that is templated on a communicator computes. ``[^m]`` excludes ``small_gather``."""

_INDUCTOR = r"^triton_(poi|red|per|for|tem|spl|mm)_"
"""Inductor's kernels, named after all nearby operators, even collectives that only feed them."""

_DATA_MOVEMENT = (
    r"(?i)^Reformat(_|\b)|n(chw|hwc)_?(to|2)_?n(chw|hwc|chhw)|batched_transpose|CatArrayBatchedCopy"
    r"|(^|[:_])transpose(_|$)|transpose_?kernel|transpose_readwrite|im(\dd)?_?2_?col|col_?2_?im"
    r"|vol2col"
    r"|split_with_sizes_copy|chunk_cat|reflection_pad|replication_pad|constant_pad"
    r"|(^|[:_])(flip|roll)_|permute_(indices|[12]D|pooled|lengths|embeddings|kernel|duplicate)"
    r"|(marlin|gptq|awq)\w*::(permute|make_sequential)|multi_tensor_(un)?(pad|transpose|swizzle)"
    r"|concat(_and_cache)?_mla|recat_copy|reshape_?and_?cache|concat_?and_?cache|expandInputRows|moe_?Permute"
    r"|(marlin|prepack|weights?)\w*_repack|repack_kernel|prepack_|reorder_tensor|preprocess_kernel|shuffle_\dbit"
    r"|pixel_shuffle|channel_shuffle|nhwcAddPadding|nhwcPad|convertTensor_kernel"
)

_FUNCTION_PATTERNS: tuple[tuple[str, str], ...] = (
    ("elementwise", r"(?i)rotary|(^|[:_])(apply_|m)?rope(_|$)|q_?k?_?norm_?rope"),
    (
        "elementwise",
        r"(?i)(silu|swiglu|act)_(and_)?mul|swiglu_(fwd|bwd|forward|backward)|(^|[:_k])de_?quant(ize)?(_|[A-Z]|$)",
    ),
    ("elementwise", r"(?i)(^|[:_])cvt_|gptq\w*::reconstruct"),
    ("reduction", r"(?i)moe_(sum|reduce)|finalize_?moe"),
    ("loss", r"(?i)aux_loss"),
    ("random", r"(?i)sampling_?from"),
    ("sort", r"(?i)group_gemm_starts|problem_sizes|expert_?offsets"),
    ("loss", r"(?i)cross_?entropy"),
    ("sort", r"(?i)top_?k[^:]*softmax|softmax[^:]*top_?k"),
    ("softmax", r"(?i)(^|:)[^:]*softmax[^:]*$"),
    (
        "attention",
        r"(?i)flash_(fwd|bwd|attn|attention|decod|split)|flash::|flash_?mla|flashattn|fmha|sdpa"
        r"|attention|attn_(fwd|bwd)|[_:]attn_|merge_attn|PrefillWith|DecodeWith"
        r"|MergeStates|_fwd_(grouped_)?kernel_stage|bwd_kernel_(dk|dq|fuse)|bwd_preprocess"
        r"|mla_(decode|fwd|reduce|combine|kernel|a16w|a8w|metadata)|mla::"
        r"|^_ZN5aiter\d+PA_"
        r"|^_?(fwd|bwd)_kernel(_(aligned|stage|inner|dq|dk|dkv|\d)|$)"
        r"|(^|[:_])(kernel_)?(mha|gqa|mqa|xqa)(_|$)|multi_?head|compute_attn_|FlashDecod|MergeState"
        # replacements of attention: linear attention and state-space models
        r"|selective_(scan|state)|gated_?delta|delta_?rule|(^|[:_])(gla|kda|gdn|ssm|mamba\d?)_"
        r"|(^|[:_])chunk_(gla|scan|state|fwd|bwd|gated|delta|scaled_dot|kda|rwkv)|state_passing"
        r"|[rw]kv\d?_(fwd|bwd|forward|backward)|kernel_(forward|backward)_wkv|wy_repr|w_u_fwd",
    ),
    (
        "convolution",
        r"(?i)implicit_?gemm|convolve|convolution|conv[123]d|[_:]conv_|conv_(fwd|bwd|depthwise)"
        r"|fprop|dgrad|wgrad|bprop|scudnn|s?\d*cudnn_|winograd|igemm_(fwd|bwd|wrw)"
        r"|MIOpenConv|AsmConv|^gfx9\w*_stride\d|cask\w*_cudnn|cudnn::cnn|cudnn_cnn|fft[12]d_|gcgemm|depthwise",
    ),
    (
        "gemm",
        r"(?i)gemm|nvjet|Cijk_|split_?k_?reduce|gemv|(^|[:_])bmm_|(^|[:_])mm_|matmul|cublas"
        r"|rocblas|hipblas|wv_?SplitK|LLMM|marlin|gptq|awq_|epilogue::impl|^dot_kernel"
        r"|reduce_1Block_kernel|xmma|(h|s|d|i|bf16_s|fp16_s)(884|1688|16816|161616)"
        r"|fused_?moe_?(kernel|[:_])|fmoe|flatmm|mul_mat|(^|[:_])moe_i?q\d|mmq_|grouped_?mm|(^|[:_])bmm(_|$)|_bmm(_|$)"
        r"|(^|[:_])(syrk|trmm|trsm|ger)_?kernel|qmm_|mma_|block_?Persist|persist_?rnn",
    ),
    (
        "transform",
        r"(?i)(^|[:_])fft(_|$)|_fft(_|$)|[sdh]pRadix\d|vkfft|(^|:)fft_|hadamard|hadacore",
    ),
    ("sort", r"(?i)top_?k|moe_?(sorting|gate|fused_gate)"),
    ("loss", r"(?i)(^|[:_])ce_(fwd|bwd|forward|backward)"),
    ("softmax", r"(?i)softmax"),
    (
        "normalisation",
        r"(?i)layer_?norm|rms_?norm|(^|[:_])rms_|batch_?norm|group_?norm|instance_?norm|(^|[:_])bn_(fw|bw|in)"
        r"|RowwiseMoments|GammaBeta|ComputeInternalGradients|ComputeFusedParams"
        r"|BackwardFusedParams|cuComputeGradInput|cuComputePartGrad|(^|[:_])ln_(fwd|bwd)"
        r"|MIOpenBatchNorm|BatchNorm|weight_norm|dnn::norm|(^|[:_])norm_(fwd|bwd)",
    ),
    (
        "embedding",
        r"(?i)embedding|index_?select|index_?elementwise|index_?put|indexing_backward"
        r"|index_?kernel|index_?copy|index_?add|index_?fill|index_?reduce|indexFunc|gather"
        r"|scatter|compute_grad_weight|krn_partial|bounds_check_indices"
        r"|linearize_index|EmbeddingBag|(^|[:_])take_|put_kernel",
    ),
    (
        "optimizer",
        r"(?i)multi_tensor_|adam([^a]|$)|adagrad|(^|[:_])(lamb|lars|lion|adan|sophia)_"
        r"|adafactor|rmsprop|sgd(_|$)|muon_|shampoo|k(Precondition)?Optimizer|optimizer",
    ),
    (
        "sort",
        r"(?i)sort|unique|scan|select_?|histogram|nonzero|cumsum|cumprod|bitonic|radix|bucketize"
        r"|run_?length|DeviceCompact|partition|moe_(lora_)?align|routing|bincount|ReduceByKey|lower_bound|upper_bound",
    ),
    ("random", r"(?i)dropout|distribution_|philox|bernoulli|random|curand|multinomial|sampling"),
    ("pooling", r"(?i)pool|up_?sample|interpolat|interp_|grid_?sample|roi_?align|resize"),
    ("loss", r"(?i)kl_div|_loss|_bce_"),
    (
        "reduction",
        r"(?i)reduce|nvfuser_\w*persistent|argm(ax|in)|norm_kernel|(^|[:_])(sum|mean|max)_kernel|welford",
    ),
    ("copy", r"(?i)copy|SubTensorOpWithCast|(^|[:_])(cast|convert)_"),
    (
        "elementwise",
        r"(?i)element_?wise|unrolled|pointwise|(^|[:_])fill|activation|act_and_mul|silu|gelu"
        r"|swiglu|geglu|relu|sigmoid|tanh|quant|triu|tril|arange|foreach|bias|clamp|masked_"
        r"|SubTensorOp|Op(\dd)?Tensor|(^|[:_])(add|mul|sub|div|scale|exp|set)_",
    ),
)
"""Family -> pattern of the function's name; the first match wins. The order matters:
``split_embedding_backward_…_adagrad`` is an embedding, ``cutlass_…_conv…gemm`` a convolution."""

_WORD_PATTERNS: tuple[tuple[str, str], ...] = tuple(
    (family, rf"_(?:{words})(?:s|ed|ing)?\d*(?:_|$)")
    for family, words in (
        ("communication", "nccl|allreduce|allgather|alltoall|p2p|on_stream"),
        ("elementwise", "m?rope|rotate|zero"),
        (
            "layout",
            "(?:kv|key|value)_(?:insert|append|update|store|write|pack|cache|buffer)"
            "|(?:append|store|write|set|insert|update)_(?:paged_)?(?:mla_)?kv|qkv|bnsh|concat|pack|unpack",
        ),
        ("attention", "mha|gqa|mqa|xqa|mla|lse|kda|gdn|ssm|mamba|attn|attention"),
        ("gemm", "projection|proj|gate_up|fc|fc_cast"),
        ("convolution", "conv(?:[123]d)?"),
        ("normalisation", "(?:layer|rms|batch|group|ada|l2)_?norm|norm|normalize|lrn"),
        ("optimizer", "momentum"),
        ("loss", "loss"),
        (
            "reduction",
            "(?:lp|l1|grad)_?norm|reduction|sum|mean|amax|absmax|arg_?max|arg_?min"
            "|arg_min_max|log_?sum_?exp|finalize|all_finite|is_?finite",
        ),
        ("embedding", "lookup|embs?|one_hot|lxu|lru|lfu|zch|tbe|prune|remap"),
        (
            "random",
            "penalties|penalty|penali[sz]e|temperature|min_p|dist|logit|sampler|sample|bitmask|rng",
        ),
        (
            "sort",
            "top_(?:k|p|n|one)|expert|router|route|routing|beam|nms|offset|indice|index|id"
            "|count|length"
            "|seq_?len|metadata|search_?sorted|prefix|segment|dedup|token|sequence",
        ),
        (
            "layout",
            "transpose|permute|unpermute|permutation|concat|cat|split|slice|stack|pad|tile"
            "|padding|expand|broadcast|unfold|fold|reverse|reorder|repack|pack|unpack"
            "|swizzle|shuffle|interleave|reformat|swap|crop|unpad|align|jagged|diagonal"
            "|group|ungroup|reshape|append|concatenate|sparsify|compress",
        ),
        ("copy", "memcpy|buffer|cast|convert|transfer|move"),
        (
            "elementwise",
            "cvt|fp4|fp8|nvfp4|mxfp4|mxfp8|fp8rowwise|rowwise|qparam|encode|decode|iota"
            "|(?:float|half|bf16)_to|to_(?:float|half|bf16)|range|eye|linspace|clip"
            "|where|pow|sqrt|cos|sin|zero|one|unary|binary|ternary|gate|gated|act|mask|noise|for_each"
            "|update|apply|axpy|axpby|saxpy|add|mul|sub|div|scale|exp",
        ),
    )
)
"""Family -> single words of a name in ``snake_case``, tried when no pattern fits."""

_GENERATED = (
    r"^(loop_|input_|wrapped_|horizontal_)?(\w+_)?fusion(_\d+)*$|^wrapped_|^fused_\w*_\d{8,}$"
    r"|^CudaCodeGen::|^kernel\d+$|^nvfuser_|^__my[el]|EigenMetaKernel|_GPU_DT_\w+_kernel$"
)
"""Kernels that XLA, TorchScript, nvFuser, TensorRT and TensorFlow generate. They are pointwise,
unless a word in the name says more."""

_THRUST: tuple[tuple[str, str], ...] = (
    ("sort", r"sort|scan|unique|copy_if|partition|_bound|__set_operations|adjacent_difference"),
    ("reduction", r"reduce"),
    ("embedding", r"gather|scatter"),
    ("copy", r"_copy"),
    ("elementwise", r"transform|fill|for_each|tabulate|generate|parallel_for"),
)
"""Family -> algorithms of Thrust, in kernels such as ``_kernel_agent``, ``parallel_for``."""

_GENERIC = r"(^|:)(\w*elementwise_kernel\w*|elementwise_kernel)$"
"""Kernels whose work only the functor, a template argument, identifies."""

_FUNCTORS: tuple[tuple[str, str], ...] = (
    ("copy", r"(direct_copy|bfloat16_copy|float16_copy|float8_copy)\w*kernel"),
    ("normalisation", r"batch_norm"),
    ("loss", r"(mse|smooth_l1|huber|kl_div|binary_cross_entropy|bce)\w*kernel|_loss_"),
    ("random", r"bernoulli|masked_scale|dropout"),
)

_OPAQUE = r"(?i)^cutlass|^ck::|^ck_tile::|^_ZN\d+(cutlass|ck)|attention_kernel_batched"
"""Function names that identify only a library, so that the whole name is searched."""

_TEMPLATE_PATTERNS: tuple[tuple[str, str], ...] = (
    (
        "attention",
        r"(?i)fmha|flash(attn|fwd|bwd|::|_attn|attention)|AttentionKernel|sdpa|[^a-z]mla",
    ),
    ("layout", r"cutlass::transform::"),
    ("gemm", r"(?i)reduce_?split_?k"),
    ("convolution", r"(?i)conv[^e]|fprop|dgrad|wgrad|ImplicitGemm"),
    ("normalisation", r"(?i)layernorm|rmsnorm|batchnorm|groupnorm"),
    ("sort", r"(?i)topk|moe_?sorting"),
    ("softmax", r"(?i)softmax"),
    ("reduction", r"(?i)device_reduce|kernel_reduce|DeviceReduce|::Reduce\w*<"),
    ("elementwise", r"(?i)elementwise|DeviceElementwise|permute"),
    ("gemm", r"(?i)gemm|cutlass|mma|matmul"),
)

_TRITON: tuple[tuple[str, str], ...] = (
    ("gemm", r"^triton__(\d+d)+$"),
    ("elementwise", r"^triton__\d"),
    ("attention", r"flex_attention|flex_decoding|triton_tem_\w*(sdpa|attention)"),
    ("convolution", r"triton_tem_\w*conv"),
    ("gemm", r"triton_tem_|triton_mm"),
    ("softmax", r"softmax"),
    ("normalisation", r"(layer|batch|group|rms|instance)_norm"),
    ("sort", r"triton_spl_|cumsum|cumprod|_sort|topk"),
    ("reduction", r"triton_(red|per)_"),
    ("embedding", r"triton_poi_fused_embedding(_dense_backward)?(_\d+)?$"),
    (
        "layout",
        r"^triton_poi_fused_+(clone|cat|permute|transpose|_unsafe_view|view|constant_pad_nd"
        r"|stack|repeat|expand|t|_+)+(_\d+)?$",
    ),
    ("copy", r"^triton_poi_fused_+((_?to_copy|copy|copy_|clone|view)_*)+(_\d+)?$"),
    ("elementwise", r"triton_(poi|for)_"),
)
"""Inductor's kernels: ``poi`` pointwise, ``red`` and ``per`` reductions, ``tem`` templates, ``spl``
split scans, ``for`` foreach; after that the fused ops. Until PyTorch 2.2 all were called
``triton_`` and Triton appended each argument's position, with ``d`` if 16 divides it and ``e`` for
a number that 16 divides. A template (a matrix product) has only pointers, the others get a size."""

_HELPER = (
    r"(?i)split_?k_?reduce|reduce_?split_?k|epilogue::impl|computeOffsets|kern_precompute"
    r"|reduce_wgrad|^(void )?scal_kernel"
    r"|flash_bwd_(dot_do_o|convert|clear|preprocess)|splitkv_combine|_attn_bwd_preprocess"
    r"|bwd_preprocess|FlashAttnBwd(Pre|Post)process|MergeStates|merge_attn|FlashAttnFwdCombine"
    r"|winograd\w*(Filter|Data|Output)|generateWinograd|scalePackedTensor|reduce_1Block_kernel"
)
"""Kernels of an operation other than the one that does its arithmetic."""

_NO_TENSOR_CORE = (
    r"(?i)simt|ffma|sgemm|dgemm|hgemm|[cz]gemm|scudnn|gemv|^(void )?dot_kernel|gemmk1|gemmSN"
    r"|reduce_1Block|split_?k_?reduce|epilogue::impl|computeOffsets|fft[12]d|naive_conv"
    r"|conv_depthwise|(d|w)grad\w*_engine|grouped_direct_kernel|paged_attention_v[12]_"
    r"|f32f32_f32f32_f32|fmha_cutlass[FB]_f32_\w*sm(50|60|70|75)|fmha_\w*sm50"
)
"""CUDA-core kernels: SIMT GEMMs, vector products, the parts of an FFT convolution, reductions."""

TENSOR_CORE = (
    r"(?i)nvjet|(^|[_<:])tensorop|(OpClass|Mma)TensorOp|wmma|[^a-z]hmma|gmma|imma|qmma|mfma|xdl|gtcx|_MI\d+x\d+x\d+|utcmma|tcgen05"
    r"|(884|1688|16816|16832|161616|168128|8816|88128|16864|168256)(tf32)?(gemm|fprop|dgrad|wgrad"
    r"|cudnn)|tensor\d+x\d+x\d+|xmma_\w*(bf16|f16|tf32|e4m3|e5m2|i8)"
    r"|(^|_)sm(80|86|89|90|100|103|120)a?_\w*(tensorop|bf16|f16|tf32|e4m3|e5m2|fp8)"
    r"|SM(70|75|80|89|90|100|120)_\d+x\d+x\d+|SM100_MMA|deep_gemm"
    r"|flash_(fwd|bwd)_(kernel|splitkv_kernel|dq|dk)|FlashAttn(Fwd|Bwd)Sm|fmhaSm|Sm(90|100)Fmha"
    r"|fmha_cutlass[FB]_(b?f16)_|fmha_cutlass[FB]_f32_\w*sm80|sdpa\w*(f16|bf16|flash)|marlin"
    r"|(^|[:_])b?mm_\w*(E4m3|E2m1|Bfloat16|Fp16)"
)
"""Tensor-core (on AMD: matrix-core) kernels. torch-tb-profiler's list of shapes (``s1688``,
``h884`` …) plus later kernels: ``nvjet`` and ``gmma`` (Hopper and after), ``wmma_tensorop``, TF32
``xmma`` kernels, CuTe atoms, flash attention, Tensile's matrix instructions (``_MI16x16x1``) and
MIOpen's ``gtcx``."""

_TENSOR_CORE_BY_FORMAT = (
    r"(?i)triton_tem_|triton_mm|attn_(fwd|bwd)|bwd_kernel_d|(unified|flash|flex|fused)_attention"
    r"|fmha|sdpa|(Batch|Single)Prefill|fused_moe_kernel"
)
"""Kernels written with a matrix-multiply primitive that always uses matrix units for 16 bits."""

_FORMAT_MARKS: dict[str, str] = {
    "bf16": r"(?i)bf16|bfloat16|nvjet_(sm\d+_)?t|^Cijk_[A-Za-z]+_[A-Za-z]+_B[BS]",
    "fp16": r"(?i)c10::Half|\b__half\b|\bhalf_t\b|\bhalf\b|fp16|([^b]|^)(float16_t|f16)"
    r"|[^a-z]h(884|1688|16816)|hgemm|nvjet_(sm\d+_)?h|^Cijk_[A-Za-z]+_[A-Za-z]+_H",
    "fp8": r"(?i)e4m3|e5m2|fp8|float8|nvjet_(sm\d+_)?q|^Cijk_[A-Za-z]+_[A-Za-z]+_[FB]8",
    "int8": r"(?i)i8816|i16832|imma|int8|signed char|^Cijk_[A-Za-z]+_[A-Za-z]+_I8",
    "tf32": r"(?i)tf32|tfloat32|[^a-z0-9]s1688(gemm|fprop|dgrad|wgrad)|nvjet_(sm\d+_)?s",
    "fp64": r"(?i)\bdouble\b|dgemm|d884|([^a-z]|^)f64|^Cijk_[A-Za-z]+_[A-Za-z]+_D",
    "fp32": r"(?i)\bfloat\b|[^t]f32|fp32|sgemm|scudnn|^Cijk_[A-Za-z]+_[A-Za-z]+_S[BSX]",
}


LIBRARIES: tuple[tuple[str, str], ...] = (
    ("FlashAttention", r"flash_(fwd|bwd)|FlashAttn|flash::"),
    ("xFormers", r"fmha_cutlass"),
    ("cuDNN", r"cudnn|xmma_(fprop|dgrad|wgrad)"),
    (
        "cuBLAS",
        r"cublas|nvjet_|\b(maxwell|volta|turing|ampere|hopper|sm\d+)_\w*gemm|splitKreduce_kernel",
    ),
    ("CUTLASS", r"cutlass_\d+_"),
    ("rocBLAS", r"^Cijk_|rocblas|hipblas"),
    ("MIOpen", r"(?i)miopen"),
    ("CUB", r"\bcub::|thrust::|cuda_cub"),
    ("rocPRIM", r"rocprim|rocrand"),
    (
        "PyTorch",
        r"at::native|TensorIterator|CatArrayBatchedCopy|(vectorized|unrolled)_elementwise_kernel",
    ),
)
"""Libraries -> patterns of the names of their compiled kernels; the first match wins. Kernels from
CUTLASS templates are named after the template's type and belong to the program."""


def library_of(name: str) -> str | None:
    """Return the library that a kernel is compiled into, so that a program cannot change its
    source. ``None`` if the name does not show a library."""
    return next(
        (library for library, pattern in LIBRARIES if re.search(pattern, name[:4096])), None
    )


def find_compute_capability(name: str) -> tuple[int, int] | None:
    """Return the compute capability in a kernel's name, or ``None`` if the name has none."""
    match = re.search(r"(?:cutlass_|[_:]sm_?)(\d{1,2})(\d)a?(?=_|\W|$)", name[:4096], re.IGNORECASE)
    return None if match is None else (int(match[1]), int(match[2]))


def function_name(name: pl.Expr) -> pl.Expr:
    """Return the function's own name, without return type, template arguments and parameters."""
    return (
        name.str.replace_all("(anonymous namespace)::", "", literal=True)
        .str.replace_all("<unnamed>::", "", literal=True)  # as Nsight Systems writes it
        .str.replace_all(r"_GLOBAL__N__\w+::", "")  # the same, with a file name in it
        .str.replace_all("fbgemm_gpu::", "", literal=True)  # not what it does
        .str.replace(labels.RETURN_TYPE.pattern, "")
        .str.extract(r"^(?:void\s+|static\s+|__global__\s+)*([^<(]*)", 1)
        .str.strip_chars()
        .str.replace(r"(\.kd|_0d?e?1[\dcde]*)$", "")  # ROCm's and Triton's endings
    )


def _to_snake_case(short: pl.Expr) -> pl.Expr:
    """Return ``_a_name_`` for ``ns::ANameKernel``, also for a mangled name."""
    words = short.str.replace_all(r"([a-z0-9])([A-Z])", "${1}_${2}").str.replace_all(
        r"([A-Z])([A-Z][a-z])", "${1}_${2}"
    )
    words = (
        pl.when(short.str.starts_with("_Z"))
        .then(words.str.replace_all(r"\d+", "_"))
        .otherwise(words)
    )
    return pl.concat_str(pl.lit("_"), words.str.replace_all(r"::|\.", "_").str.to_lowercase())


@cache_by_name
def describe_kernels(names: pl.Series) -> pl.DataFrame:
    """Classify kernels by name, with one row for each of ``names`` (strings).

    Columns: ``family`` (``other`` if unknown), ``communication`` (bool), ``moving`` (bool: it only
    rearranges or copies data, whatever op launched it), ``helper`` (bool: not the part of its
    operation that does the arithmetic), ``matrix_unit`` (bool; null if the name does not say
    whether it runs on tensor cores), ``matrix_if_16_bit`` (bool: it runs there if its inputs have
    16 bits or less), ``direction`` (convolution backward: 1 input, 2 weight gradient, 0 unknown),
    ``dtype`` (one of FORMATS; null if not recorded, or several)."""
    frame = pl.DataFrame({"name": names.cast(pl.String)}).with_columns(
        function_name(pl.col("name"))
    )
    frame = frame.rename({"name": "head"}).with_columns(names.cast(pl.String).alias("name"))
    text, short = pl.col("name"), pl.col("head")
    communication = short.str.contains(_COMMUNICATION)
    communication |= text.str.contains("mscclpp::")  # its kernels are named with single verbs
    communication &= ~short.str.contains(_INDUCTOR)
    frame = frame.with_columns(
        family=pl.when(communication).then(pl.lit("communication")), communication=communication
    )
    frame = frame.with_columns(_fill_families(frame).cast(Family))
    moving = pl.col("family").is_in(["layout", "copy"]) & ~text.str.starts_with("triton_")
    return frame.select(
        "family",
        "communication",
        moving=moving,
        helper=text.str.contains(_HELPER),
        matrix_unit=pl.when(text.str.contains(_HELPER))
        .then(False)
        .when(text.str.contains(_NO_TENSOR_CORE) & ~text.str.contains("(?i)tensorop"))
        .then(False)
        .when(text.str.contains(TENSOR_CORE))
        .then(True),
        matrix_if_16_bit=text.str.contains(_TENSOR_CORE_BY_FORMAT),
        direction=pl.when(text.str.contains(r"(?i)dgrad|bwd_data|igemm_bwd"))
        .then(1)
        .when(text.str.contains(r"(?i)wgrad|bwd_weight|bwd_filter|igemm_wrw"))
        .then(2)
        .otherwise(0)
        .cast(pl.Int8),
        dtype=_find_format(text),
    )


def _fill_families(frame: pl.DataFrame) -> pl.Series:
    """Find the families of names that have none yet. Each set of patterns is applied only to names
    that earlier sets left open, and not compiled if there are none. For the few names of a trace,
    compiling patterns takes longer than applying them."""
    text, short = pl.col("name"), pl.col("head")
    foreach = short.str.contains("multi_tensor_apply")
    steps: list[tuple[pl.Expr, Callable[[], pl.Expr]]] = [
        (text.str.starts_with("triton_"), lambda: _first_match(text, _TRITON)),
        (pl.lit(True), lambda: _family_if(short.str.contains(_DATA_MOVEMENT), "layout")),
        (short.str.contains(_OPAQUE), lambda: _first_match(text, _TEMPLATE_PATTERNS)),
        (foreach, lambda: _classify_foreach(text)),
        (short.str.contains("cuda_cub::"), lambda: _first_match(text, _THRUST)),
        (short.str.contains(_GENERIC), lambda: _first_match(text, _FUNCTORS)),
        (pl.lit(True), lambda: _first_match(short, _FUNCTION_PATTERNS)),
        (pl.lit(True), lambda: _first_match(_to_snake_case(short), _WORD_PATTERNS)),
        (pl.lit(True), lambda: _family_if(short.str.contains(_GENERATED), "elementwise")),
        (pl.lit(True), lambda: pl.lit("other")),
    ]
    family = frame["family"]
    for condition, decide in steps:
        rows = pl.Series(np.flatnonzero(family.is_null().to_numpy()))
        if not len(rows):
            break
        open_names = frame[rows]
        applies = open_names.select(pl.repeat(True, pl.len()) & condition).to_series()
        if applies.any():
            index = rows.filter(applies)
            family = family.scatter(index, frame[index].select(decide()).to_series())
    return family


def _family_if(condition: pl.Expr, family: str) -> pl.Expr:
    return pl.when(condition).then(pl.lit(family))


def _first_match(text: pl.Expr, table: tuple[tuple[str, str], ...]) -> pl.Expr:
    """Return the family of the first pattern that matches, or null."""
    return pl.coalesce(_family_if(text.str.contains(pattern), family) for family, pattern in table)


def _classify_foreach(text: pl.Expr) -> pl.Expr:
    """Classify ``multi_tensor_apply`` as optimizer, unless its functor is a norm or a copy."""
    return (
        pl.when(text.str.contains("LpNorm|L2Norm|NormFunctor"))
        .then(pl.lit("reduction"))
        .when(text.str.contains("CopyFunctor|Copy<"))
        .then(pl.lit("copy"))
        .otherwise(pl.lit("optimizer"))
    )


def _find_format(text: pl.Expr) -> pl.Expr:
    """Return the single format in a name. A matrix kernel also names its accumulator (fp32) and
    output (16 bits with 8-bit inputs): there the narrowest counts. Elsewhere two formats count as
    none."""
    text = text.str.replace_all("Fp8KVCacheDataType", "", literal=True)  # the format of the cache
    marks = {name: text.str.contains(pattern) for name, pattern in _FORMAT_MARKS.items()}
    count = pl.sum_horizontal(*marks.values())
    matrix = pl.col("family").is_in(list(MATRIX))
    both16 = marks["bf16"] & marks["fp16"]
    narrow = pl.coalesce(
        _family_if(marks["fp8"], "fp8"),
        _family_if(marks["int8"], "int8"),
        _family_if(marks["bf16"] & ~both16, "bf16"),
        _family_if(marks["fp16"] & ~both16, "fp16"),
        _family_if(marks["tf32"] & ~both16, "tf32"),
        _family_if(marks["fp64"] & ~both16, "fp64"),
        _family_if(marks["fp32"] & ~both16, "fp32"),
    )
    single = pl.coalesce(_family_if(mark, name) for name, mark in marks.items())
    return pl.when(matrix).then(narrow).otherwise(pl.when(count == 1).then(single)).cast(Format)
