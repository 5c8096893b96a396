"""Library functions that take much of a step's Python time, with their cost and cure: the one table
for the loading, the loop's own code and the forward pass."""

import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

from advisor.measure.host.library_time import LibraryTime, find_hottest_library_call
from advisor.measure.host.stacks import SampledStack

CACHEABLE = ("the result is the same each time, and fits in memory",)


class LibraryFix:
    """Kind of library function, and its replacement."""

    def __init__(
        self,
        work: str,
        fix: str,
        code: str = "",
        *,
        frames: str = "",
        calls: str = "",
        workers: str = "",
        workers_first: bool = False,
        assumptions: tuple[str, ...] = CACHEABLE,
    ) -> None:
        self.work = work
        """Name of its work, the subject of a title: ``Parsing text``."""
        self.fix = fix
        self.code = code
        self.workers = workers
        """Warning where DataLoader workers run it. Empty if there is none."""
        self.workers_first = workers_first
        """Whether loader workers are the first cure: it waits, or is needed for each batch."""
        self.assumptions = assumptions
        self._frames, self._calls = frames, calls

    @cached_property
    def frames(self) -> re.Pattern[str] | None:
        """Pattern of its frames, ``file(line): function``, or ``None`` if it has none."""
        return re.compile(rf"(?:^|/)(?:{self._frames})") if self._frames else None

    @cached_property
    def calls(self) -> re.Pattern[str] | None:
        """Pattern of calls without Python code: ``numpy.array``, ``.read`` of an object."""
        return re.compile(rf"^(?:{self._calls})$") if self._calls else None


_FRAME_LINE = r"\(\d+\): (?:\w+\.)*"
"""Text of a frame between its file and its function."""

LIBRARY_FIXES = (
    LibraryFix(
        "Reading an .npz archive again at each access",
        "Read the arrays of an .npz archive once and keep them. np.load keeps none, so each access "
        "reads and inflates a whole array. Arrays too large for memory belong in uncompressed .npy "
        "files, opened with mmap_mode='r'.",
        "arrays = dict(np.load(file))             # once, in __init__\n"
        "# or, uncompressed: rows = np.load('rows.npy', mmap_mode='r')",
        frames=rf"numpy/lib/_?npyio\w*\.py{_FRAME_LINE}__getitem__",
        workers="An .npz file that is open before the workers start is shared: reads of it may "
        "return garbage.",
    ),
    LibraryFix(
        "Making windows, filters or modules again",
        "Make it once, in __init__ or next to the function, and keep it: equal arguments give "
        "equal values.",
        "self.window = torch.hann_window(n_fft)   # in __init__, not for each sample",
        frames=r"torchaudio/functional/\w+\.py"
        rf"{_FRAME_LINE}(?:_get_sinc_resample_kernel|\w*_?fbanks|create_dct)"
        rf"|torchaudio/transforms/\w+\.py{_FRAME_LINE}__init__|librosa/filters\.py"
        r"|scipy/signal/(?:windows/|_?fir_filter|_?filter_design)"
        rf"|numpy/lib/\w+\.py{_FRAME_LINE}(?:hanning|hamming|blackman|bartlett|kaiser|i0|meshgrid)"
        rf"|numpy/lib/\w*index_tricks\w*\.py{_FRAME_LINE}__getitem__"
        rf"|torch/nn/(?:init\.py|modules/\w+\.py{_FRAME_LINE}__init__|modules/\w+\.py{_FRAME_LINE}reset_parameters)"
        rf"|torch/signal/windows/|torch/functional\.py{_FRAME_LINE}meshgrid"
        r"|(?:re/_(?:compiler|parser)|sre_(?:compile|parse))\.py"
        r"|(?:transformers|tokenizers|diffusers|timm)/\S+\.py"
        rf"{_FRAME_LINE}(?:from_pretrained|from_file|create_model)",
        calls=r"(?:torch\.)?(?:bartlett|blackman|hamming|hann|kaiser)_window"
        r"|numpy\.(?:bartlett|blackman|hamming|hanning|kaiser|indices|meshgrid)",
        assumptions=("its arguments do not change",),
    ),
    LibraryFix(
        "Passing tensors between processes one by one",
        "Send one message for many results, such as a rollout. Each tensor of a message opens a "
        "connection and a file. NumPy arrays in a message open none, and neither does a tensor in "
        "shared memory that is written in place.",
        "queue.put(torch.stack(results))    # once for many steps, not in each\n"
        "# or: shared = torch.empty(shape).share_memory_(), made once",
        frames=r"multiprocessing/resource_sharer\.py|torch/multiprocessing/reductions\.py",
        assumptions=("results can wait for the end of a rollout",),
    ),
    LibraryFix(
        "Searching in lists",
        "Keep a dictionary from value to position, or a set: a list compares each of its items. "
        "Numbers in a sorted array are found together, with np.searchsorted.",
        "position = {value: at for at, value in enumerate(items)}   # once\n"
        "at = position[value]      # not items.index(value)",
        calls=r"\.(?:index|count|remove)",
        assumptions=("it searches a list, and no text",),
    ),
    LibraryFix(
        "Parsing text",
        "Parse the text once, and store the values as a binary array: .npy, safetensors or "
        "Parquet. Or keep them in memory.",
        "table = np.loadtxt(file); np.save('table.npy', table)   # once\n"
        "rows = np.load('table.npy', mmap_mode='r')",
        frames=rf"numpy/lib/_?npyio\w*\.py{_FRAME_LINE}(?:loadtxt|genfromtxt|fromregex|_read)"
        rf"|json/(?:(?:decoder|scanner)\.py|__init__\.py{_FRAME_LINE}loads?)|csv\.py|pandas/io/|yaml/|xml/"
        rf"|html/|bs4/|configparser\.py|ast\.py{_FRAME_LINE}(?:literal_eval|parse)"
        r"|polars/io/(?:csv|json|ndjson)",
        calls=r"(?:\w+\.)?(?:fromstring|literal_eval)|_?csv\.reader"
        r"|(?:_?json|orjson|ujson|simdjson|rapidjson|msgspec\.json|yaml)\.(?:loads?|decode)",
    ),
    LibraryFix(
        "Reading the samples with pickle",
        "Store all samples in a few arrays or tensors, without pickle, and open them once. "
        "torch.load(mmap=True) and np.load(mmap_mode='r') then read single rows.",
        "rows = np.load('rows.npy', mmap_mode='r')   # in __init__\n"
        "sample = torch.from_numpy(np.array(rows[index]))",
        frames=rf"torch/(?:serialization|_weights_only_unpickler)\.py{_FRAME_LINE}_*(?:\w*load\w*|persist\w*)"
        r"|joblib/numpy_pickle|pickle\.py|shelve\.py|dill/|cloudpickle/",
        calls=r"_?pickle\.\w+|marshal\.loads?",
    ),
    LibraryFix(
        "Loading an array file",
        "Load each file once and keep its array. Or store all samples in one uncompressed .npy "
        "file, and open that once with mmap_mode='r'.",
        "rows = np.load('rows.npy', mmap_mode='r')   # in __init__\n"
        "sample = torch.from_numpy(np.array(rows[index]))",
        frames=rf"numpy/lib/_?npyio\w*\.py{_FRAME_LINE}load|numpy/lib/_?format\w*\.py|numpy/_core/_?memmap"
        r"|safetensors/",
        calls=r"numpy\.(?:load|fromfile)|(?:safetensors\.)?(?:deserialize|safe_open)",
    ),
    LibraryFix(
        "Reading rows of an HDF5 or Zarr file",
        "Read many rows in one call: consecutive ones, or sorted indices in __getitems__. Choose "
        "chunks as large as what you read, and open the file once. What fits in memory, read once.",
        "def __getitems__(self, indices):   # of the Dataset: a batch at once\n"
        "    rows = self.file['x'][sorted(indices)]",
        frames=r"h5py/|zarr/|netCDF4/|xarray/",
        workers="Each worker must open the file itself.",
        assumptions=("rows are read together, or kept",),
    ),
    LibraryFix(
        "Querying a database",
        "Open the database once in each process. Read a batch with one query or transaction, in "
        "__getitems__. What fits in memory, read once.",
        "marks = ','.join('?' * len(indices))\n"
        "rows = db.execute(f'SELECT x FROM t WHERE id IN ({marks})', indices)",
        frames=r"sqlite3/|sqlalchemy/|psycopg2?/|pymongo/|lmdb/|duckdb/",
        calls=r"sqlite3\.\w+|lmdb\.\w+|duckdb\.\w+"
        r"|\.(?:execute|executemany|fetchone|fetchmany|fetchall)",
        workers="Each worker must open the database itself.",
        assumptions=("a batch can be read with one query",),
    ),
    LibraryFix(
        "Reading from the network",
        "Copy the data to a local disk before the run. Or read ahead: whole shards, several "
        "requests at once, in threads.",
        "with ThreadPoolExecutor(16) as pool:   # a batch's requests at once\n"
        "    samples = list(pool.map(read, indices))",
        frames=r"requests/|urllib3?/|http/client\.py|socket\.py|ssl\.py|aiohttp/|httpx/|httpcore/"
        r"|boto3/|botocore/|s3fs/|gcsfs/|fsspec/|smart_open/|grpc/"
        r"|huggingface_hub/",
        calls=r"_?socket\.\w+|\.(?:recv|recv_into|sendall)",
        workers_first=True,
        assumptions=("several requests can wait at once, or a local disk holds the data",),
    ),
    LibraryFix(
        "Starting other programs",
        "Call a library in this process in place of another program, or do its work for all data "
        "once, before the run.",
        frames=r"subprocess\.py",
        calls=r"(?:_posixsubprocess|posix|nt|os)\.(?:fork_exec|system|popen|posix_spawn)",
    ),
    LibraryFix(
        "Decompressing data",
        "Decompress the data once. Keep it in memory, or store it uncompressed, so that "
        "np.memmap reads only the rows that are used.",
        "rows = np.load('rows.npy', mmap_mode='r')   # uncompressed, in __init__\n"
        "sample = np.array(rows[index])",
        frames=r"gzip\.py|bz2\.py|lzma\.py|_compression\.py|compression/|zipfile(?:/__init__)?\.py"
        r"|tarfile\.py|zstandard/|lz4/|blosc2?/|numcodecs/",
        calls=r"(?:zlib|gzip|bz2|lzma|lz4|lz4\.\w+|zstd|zstandard|snappy|blosc2?|brotli)\.\w+"
        r"|\.decompress",
        assumptions=("the uncompressed data fits in memory or on the disk",),
    ),
    LibraryFix(
        "Transforming images",
        "Transform whole batches of tensors with torchvision.transforms.v2. Keep what is the same "
        "each time, such as resizing.",
        "batch = augment(torch.stack(images))  # v2 transforms, once per batch",
        frames=r"torchvision/transforms|kornia/",
        assumptions=("the batch's images have one size",),
    ),
    LibraryFix(
        "Decoding and transforming images",
        "Store images at the size that is used, decoded where they fit. Image.draft decodes a JPEG "
        "at a smaller size. Transform whole batches of tensors with torchvision.transforms.v2.",
        "image.draft('RGB', (size, size))      # before PIL decodes a JPEG\n"
        "batch = augment(torch.stack(images))  # v2 transforms, once per batch",
        frames=r"PIL/|torchvision/(?:io|datasets)|cv2/|albumentations/|imageio/|skimage/",
        calls=r"(?:cv2|turbojpeg|pyvips)(?:\.\w+)*",
        assumptions=("smaller images give the same training",),
    ),
    LibraryFix(
        "Decoding and resampling audio",
        "Decode and resample each file once, and store it at the rate that is used. Make filters "
        "and transforms once, and compute features for whole batches.",
        "self.resample = torchaudio.transforms.Resample(rate, 16_000)   # once",
        frames=r"torchaudio/|librosa/|soundfile\.py|audioread/|resampy/|soxr/|pydub/|torchcodec/",
    ),
    LibraryFix(
        "Reading single rows of a table",
        "Convert the columns to arrays once, and index these: df[columns].to_numpy() in __init__. "
        "Each .loc, .iloc, iterrows or apply makes new objects in Python.",
        "self.x = torch.from_numpy(df[columns].to_numpy(np.float32))   # in __init__",
        frames=r"pandas/|polars/",
        assumptions=("the table does not change during the run",),
    ),
    LibraryFix(
        "Converting rows of a dataset",
        "Convert the columns once: dataset.with_format('torch') or 'numpy' returns arrays. Read a "
        "batch with one slice or list of indices, in __getitems__.",
        "data = dataset.with_format('numpy')\nx = data['x'][:]   # once, where it fits in memory",
        frames=r"datasets/|pyarrow/",
        calls=r"\.(?:as_py|to_pylist)",
        assumptions=("the rows are needed as arrays",),
    ),
    LibraryFix(
        "Fitting or applying a scikit-learn transform",
        "Transform the whole table once, before the loop: one call for all rows costs hardly more "
        "than one for a single row.",
        "x = torch.from_numpy(scaler.transform(table)).float()   # once",
        frames=r"sklearn/",
    ),
    LibraryFix(
        "Tokenizing and searching text",
        "Tokenize the texts once, before the loop, in batches and with a fast tokenizer. Store the "
        "ids as arrays.",
        "ids = tokenizer(texts, truncation=True)['input_ids']   # once, all texts",
        frames=r"re/__init__\.py|re\.py|sre_\w+\.py|string\.py|unicodedata|nltk/|spacy/|jieba/"
        r"|transformers/(?:tokenization|models/\w+/tokenization)|tokenizers/|sentencepiece/"
        r"|tiktoken/",
        calls=r"re\.\w+|regex\.\w+"
        r"|\.(?:findall|finditer|subn|fullmatch|split|lower|translate|encode|encode_batch)",
    ),
    LibraryFix(
        "Copying objects with copy.deepcopy",
        "Copy only what changes: dict(sample), list(sample), tensor.clone(), array.copy(). "
        "copy.deepcopy visits each object in Python.",
        "sample = dict(self.samples[index])   # its tensors are shared until one is replaced",
        frames=rf"copy\.py{_FRAME_LINE}(?:deepcopy|_deepcopy\w*|_reconstruct|copy)",
        assumptions=("the rest of the object stays as it is",),
    ),
    LibraryFix(
        "Picking random items from a sequence",
        "Keep items in a list or array as a ring buffer, since indexing a deque is slow, and "
        "draw indices in one NumPy call. An array with a row for each item gives the batch at "
        "once: items[rows]. random.choices adds up its weights in each call: pass cum_weights.",
        "self.items[self.added % capacity] = item   # a list, not a deque\n"
        "self.added += 1\n"
        "count = min(self.added, capacity)\n"
        "rows = self.rng.choice(count, n, replace=False)   # np.random.default_rng()\n"
        "batch = [self.items[row] for row in rows]",
        frames=rf"random\.py{_FRAME_LINE}(?:sample|choices?|shuffle)\b",
        assumptions=("other random numbers, drawn together, serve as well",),
    ),
    LibraryFix(
        "Drawing random numbers",
        "Draw many numbers in one call, with torch on the GPU if they are used there. "
        "choice(n, replace=False), permutation and shuffle order all n numbers: randint draws only "
        "what is needed. With weights, add them up once: np.searchsorted then draws from the sums. "
        "Of weights that change from draw to draw, keep a sum tree (torchrl's PrioritizedSampler).",
        "ids = torch.randint(n, (count,), device=device)   # may draw a number twice\n"
        "# with weights: sums = np.cumsum(weights); sums /= sums[-1]   # once\n"
        "# ids = np.searchsorted(sums, np.random.default_rng().random(count))",
        frames=r"random\.py",
        calls=r"_?random\.\w+|numpy\.random\.\w+"
        r"|\.(?:choice|choices|integers|randint|permutation|shuffle|getrandbits)",
        assumptions=("the numbers can be drawn together",),
    ),
    LibraryFix(
        "Calling torch.tensor or np.array",
        "Join arrays with np.stack and torch.from_numpy, and tensors with torch.stack: given a "
        "list, torch.tensor and np.array visit each element. Keep numbers in arrays, not in lists.",
        "x = torch.from_numpy(np.stack(arrays))   # not torch.tensor(arrays)",
        calls=r"(?:torch\.)?(?:tensor|as_tensor|asarray|\w*Tensor)"
        r"|(?:numpy\.)?(?:array|asarray|asanyarray|fromiter)|\.tolist",
        assumptions=("it is given lists",),
    ),
    LibraryFix(
        "Writing logs and records",
        "Log every N steps and print less, or write from another thread.",
        "if step % 100 == 0:\n    log(metrics)",
        frames=r"logging/|loguru/|tqdm/|rich/|wandb/|mlflow/|tensorboardX?/"
        rf"|json/(?:encoder\.py|__init__\.py{_FRAME_LINE}dumps?)|numpy/lib/\w+\.py{_FRAME_LINE}savetxt"
        r"|torch/utils/tensorboard/|traceback\.py|warnings\.py|pprint\.py",
        calls=r"builtins\.print|\.(?:write|writelines|flush)",
        assumptions=("fewer lines are enough",),
    ),
    LibraryFix(
        "Looking for files and opening them",
        "List the folder once, in __init__. Store the samples in a few large files, and keep these "
        "open.",
        "files = sorted(os.listdir(root))   # once, in __init__",
        frames=r"glob\.py|fnmatch\.py|pathlib\.py|pathlib/|genericpath\.py|posixpath\.py|ntpath\.py"
        rf"|os\.py{_FRAME_LINE}(?:walk|fwalk|makedirs)|tempfile\.py|shutil\.py",
        calls=r"(?:os|posix|nt)\.\w+|_?io\.open|builtins\.open|\.(?:read|readline|readinto)",
        assumptions=("the files do not change during the run",),
    ),
    LibraryFix(
        "Waiting (a sleep, a lock, a queue)",
        "Remove the wait, or wait in another thread: the step goes on, and takes the result when "
        "it is there.",
        "answer = pool.submit(ask, batch)   # a ThreadPoolExecutor; answer.result() later",
        frames=rf"threading\.py{_FRAME_LINE}(?:wait|acquire|join|wait_for|_wait_for_tstate_lock|__enter__)"
        rf"|queue\.py{_FRAME_LINE}(?:get|put)|multiprocessing/|concurrent/futures/|asyncio/|selectors\.py",
        calls=r"(?:time\.)?sleep|select\.\w+|\.(?:acquire|poll)|_thread\.\w+",
        workers_first=True,
        assumptions=("the step can go on meanwhile",),
    ),
    LibraryFix(
        "Joining samples to a batch",
        "Samples that fit into memory can be one tensor, from which a batch is taken by its "
        "indices: DataLoader(dataset, batch_size=None, sampler=BatchSampler(…)). Then nothing has "
        "to be joined.",
        "def __getitem__(self, indices):   # of the Dataset: a batch at once\n"
        "    return self.x[indices], self.y[indices]",
        frames=r"torch/utils/data/_utils/(?:collate|pin_memory)\.py",
        workers_first=True,
        assumptions=("the samples have one size, and fit into memory",),
    ),
)
"""Known kinds, the more specific first. A stack belongs to the first kind that matches it."""


class LibraryUse(NamedTuple):
    """The library function that takes most of a part of the step."""

    time: LibraryTime
    cure: LibraryFix | None
    """Cure, or ``None`` if this function is unknown."""
    timed: bool
    """Whether the stacks are of a window, with their times. Sampled stacks only count."""

    def sentence(self, part: str) -> str:
        """Return a sentence with its share of the ``part``, such as ``the loading``."""
        stacks_text = f"{part} is" if self.timed else f"the sampled stacks of {part} are"
        return f" {self.time.share:.0%} of {stacks_text} in {self.time.text}."

    def advice(self, part: str) -> dict[str, Any]:
        """Return texts of a finding about it. Empty if the function is unknown."""
        if self.cure is None:
            return {}
        return {
            "title": f"{self.cure.work} takes much of {part}",
            "fix": self.cure.fix,
            "code": self.cure.code,
            "assumptions": self.cure.assumptions,
        }


def find_library_use(stacks: Sequence[SampledStack], *, timed: bool = False) -> LibraryUse | None:
    """Find the library function with most of these samples, or time, if there is one."""
    hottest_call = find_hottest_library_call(stacks, _find_cure)
    return None if hottest_call is None else LibraryUse(*hottest_call, timed=timed)


def _find_cure(frames: Sequence[str], call: str) -> tuple[LibraryFix, int] | None:
    for cure in LIBRARY_FIXES:
        if cure.frames is not None:
            for index, frame in enumerate(frames):
                if cure.frames.search(frame):
                    return cure, index
        if call and cure.calls is not None and cure.calls.match(call):
            return cure, len(frames)
    return None
