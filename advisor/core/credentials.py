"""Detection of credentials by names, and by the known formats of services' tokens.

The recorder uses it to keep credentials off the disk, and redaction uses it too. Every function
takes linear time: patterns read each character a bounded number of times, and one scan finds what
follows a name or a quote. Imports only the standard library.

The formats of tokens are public. The list follows gitleaks (MIT,
https://github.com/gitleaks/gitleaks) where a service's own documentation was not at hand."""

import re
from collections.abc import Callable, Sequence
from functools import lru_cache

_MAX_NAME_LENGTH = 200
"""Maximum number of characters read of a name: its last ones."""

# -- names --------------------------------------------------------------------------------------

_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_SECRET_WORDS = frozenset(
    """
        secret secrets password passwords passwd passphrase passcode pwd credential
        credentials creds apikey apikeys authorization bearer cookie cookies dsn signature
        sig
        """.split()
)
"""Words that mark a name as a credential anywhere in it."""
_LAST_WORDS = frozenset({"auth", "pat"})
"""Words that mark a name as a credential if they are its last word."""
_SECRET_PARTS = """
    password passwd passphrase apikey accesskey privatekey secretkey sessionid authtoken
    accesstoken connectionstring
    """.split()
"""Parts that mark a name as a credential across its words (``db.passWord``, ``OPENAIAPIKEY``)."""
_BEFORE_PASS = frozenset(
    {"db", "user", "smtp", "redis", "ftp", "ssh", "sudo", "http", "proxy", "mysql", "pg", "my"}
)
_BEFORE_KEY = frozenset(
    """
        api access secret private auth ssh account wandb hf openai encryption signing
        master service storage license deploy
        """.split()
)
_NO_KEY = frozenset(
    """
        image images text label labels caption sort monitor metric dataset data column
        state dict target input inputs output outputs feature features json primary
        foreign group index cache query q k v qk kv value prompt response answer question
        audio video public hot batch loss log train eval test val attention attn num n per
        max min model optimizer param params config map registry lookup random prng rng
        dispatch missing unexpected extra ignore exclude include only self
        """.split()
)
"""Words before ``key`` that show that it is not a credential."""
_NO_TOKEN_BEFORE = frozenset(
    """
        pad eos bos unk mask sep cls max min num n per image special new added next first
        last prev eot eom stop start end class text audio video time ms sub input output
        word decoder encoder prompt visual vision forced bad suppress top
        """.split()
)
_NO_TOKEN_AFTER = frozenset(
    """
        embedding embeddings embed embedder emb id ids type types dim dims size length len
        count counts weight weights mixing mixer drop dropout limit per shift merge
        merging pruning level wise index indices idx mask masks loss accuracy acc budget
        head norm proj pos position positions logits logprobs prob probs class
        classification parallel dispatcher dispatch rate stream span permute permutation
        bucket buckets choice routing router
        """.split()
)
"""Words next to ``token`` that show that it is a piece of text."""
_JOINED_TOKEN = frozenset({"subtoken", "detoken", "pretoken", "retoken", "multitoken", "ntoken"})


@lru_cache(maxsize=20_000)
def is_secret_name(name: str) -> bool:
    """Return whether the words of an option, variable or key mark it as a credential
    (``--hf-token``, ``wandb.api_key``, ``s3.key``, but not ``--max-token``, ``--tokenizer``,
    ``image_key``)."""
    words = [word.lower() for word in _WORDS.findall(name[-_MAX_NAME_LENGTH:])]
    if not words:
        return False
    if not _SECRET_WORDS.isdisjoint(words) or words[-1] in _LAST_WORDS:
        return True
    joined = "".join(words)
    if any(part in joined for part in _SECRET_PARTS):
        return True
    for index, word in enumerate(words):
        before = words[index - 1] if index else ""
        after = words[index + 1] if index + 1 < len(words) else ""
        if word == "token":
            if before not in _NO_TOKEN_BEFORE and after not in _NO_TOKEN_AFTER:
                return True
        elif word.endswith("token") and word not in _JOINED_TOKEN:
            return True
        elif word in ("key", "keys"):
            if before in _BEFORE_KEY:
                return True
            if word == "key" and not after and before and before not in _NO_KEY:
                return True
        elif word == "pass" and not after and (not before or before in _BEFORE_PASS):
            return True
    return False


_IDENTITY_NAMES = re.compile(
    r"(?:[A-Z0-9]{1,40}_){0,8}(?:USER|USERNAME|LOGNAME|LOGIN|HOST|HOSTNAME|NODENAME|NODELIST"
    r"|ACCOUNT|HOME|MAIL|EMAIL|ADDR|FQDN)(?:_NAME|_ID)?"
    r"|[Uu]ser|username|[Uu]ser_?[Nn]ame|host_?[Nn]ame|login|logname|node_?[Nn]ame|nodelist|fqdn"
)


def is_identity_variable(name: str) -> bool:
    """Return whether a variable contains a user, a machine or a home folder by its name: ``USER``,
    ``SLURM_JOB_USER``, ``MASTER_ADDR``, ``hostname``."""
    return len(name) <= _MAX_NAME_LENGTH and _IDENTITY_NAMES.fullmatch(name) is not None


# -- shapes -------------------------------------------------------------------------------------

_TOKENS = re.compile(
    # a private key, to its end or that of the text
    r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----"
    r"[\s\S]*?(?:-----END [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----|\Z)"
    r"|(?<![A-Za-z0-9])(?:"
    + "|".join(
        (
            r"hf_[A-Za-z0-9]{8,}",
            r"api_org_[A-Za-z0-9]{16,}",  # Hugging Face, organisations
            r"sk-[A-Za-z0-9_-]{8,}",  # OpenAI, Anthropic, OpenRouter …
            r"(?:gsk_|r8_)[A-Za-z0-9]{32,}",  # Groq, Replicate
            r"(?:xai-|nvapi-|pplx-|tvly-|lsv2_(?:pt|sk)_|wandb_v1_)[\w-]{20,}",
            r"(?:AKIA|ASIA|AGPA|AROA|AIDA|ABIA|ACCA)[0-9A-Z]{12,}",  # AWS
            r"AIza[0-9A-Za-z_-]{20,}",  # Google
            r"GOCSPX-[\w-]{16,}",
            r"ya29\.[\w.-]{16,}",
            r"gh[pousr]_[A-Za-z0-9]{16,}",  # GitHub
            r"github_pat_[A-Za-z0-9_]{16,}",
            r"gl(?:pat|dt|rt|ptt|oas|cbt|ft|soat|agent|imt)-[\w.-]{16,}",  # GitLab
            r"(?:xox[a-z]|xapp)-[A-Za-z0-9-]{8,}",  # Slack
            r"pypi-[A-Za-z0-9_-]{16,}",
            r"npm_[A-Za-z0-9]{20,}",
            r"rubygems_[a-f0-9]{32,}",
            r"dckr_(?:pat|oat)_[\w-]{16,}",  # Docker
            r"dapi[a-f0-9]{32}(?:-\d)?",  # Databricks
            r"dkea[a-f0-9]{32}(?:-\d)?",
            r"hv[sbr]\.[\w-]{16,}",  # HashiCorp Vault
            r"[\w]{14}\.atlasv1\.[\w=-]{40,}",  # HashiCorp Terraform
            r"do[opr]_v1_[a-f0-9]{32,}",  # DigitalOcean
            r"dp\.(?:pt|st|ct|sa|scim|audit)\.[\w.-]{16,}",  # Doppler
            r"(?:[srp]k_(?:live|test|prod)|whsec)_[A-Za-z0-9]{16,}",  # Stripe
            r"SG\.[\w-]{16,}\.[\w-]{16,}",  # SendGrid
            r"shp(?:at|ca|pa|ss)_[a-fA-F0-9]{32}",  # Shopify
            r"sntry[su]_[\w+/=-]{16,}",  # Sentry
            r"gl(?:c|sa)_[\w+/=-]{32,}",  # Grafana
            r"(?:NRAK|NRII|NRJS)-[A-Za-z0-9_-]{16,}",  # New Relic
            r"PMAK-[a-f0-9-]{24,}",  # Postman
            r"pscale_(?:tkn|pw|oauth)_[\w.=-]{16,}",  # PlanetScale
            r"(?:lin_api|figd|secret|ntn)_[A-Za-z0-9_-]{24,}",
            r"ATATT3[\w=-]{20,}",  # Atlassian
            r"AGE-SECRET-KEY-1[A-Z0-9]{20,}",
            r"EAA[A-Z][A-Za-z0-9]{40,}",  # Facebook
            r"key-[a-f0-9]{32}",  # Mailgun
            r"(?:tskey-[\w-]{16,}|pul-[a-f0-9]{40})",  # Tailscale, Pulumi
            # a JSON web token; the bound keeps a text of nothing but beginnings linear
            r"eyJ[A-Za-z0-9_-]{8,1000}\.[A-Za-z0-9_-]{4,}+(?:\.[A-Za-z0-9_-]*+)?",
            r"(?i:(?:bearer|basic)\s++)[A-Za-z0-9._~+/=-]{8,}",
        )
    )
    + ")"
)
_IN_URL = re.compile(r"(?<=://)[^\s/@'\"]++@")


def hide_known(text: str, hidden: str) -> str:
    """Replace tokens of known formats, and the user and password in URLs."""
    if "://" in text:
        text = _IN_URL.sub(f"{hidden}@", text)
    return _TOKENS.sub(hidden, text)


# -- assignments --------------------------------------------------------------------------------

_ASSIGNMENT = re.compile(r"(?<![\w.-])([\w.-]++)(?:\\*+[\"'])?+\s*+(?:=|:(?!:))(?!=)\s*+")
_OPTION = re.compile(r"(?<![\w.-])(--?[A-Za-z][\w.-]*+)\s++(?!-)")
_QUOTE = re.compile(r"\\*+[\"']")
_BARE_VALUE = re.compile(r"[^\s,;&'\"]++")
_WORD = re.compile(r"\S++")
_BLOCK = re.compile(r"([|>][-+\d]{0,2}[ \t]*+\n[ \t]++)[^\n]*+(?:\n[ \t]++[^\n]*+)*+")
"""Block of several lines in YAML."""
_BRACKET = re.compile(r"[\[\]{}]")


def hide_values(text: str, hidden: str, private: Callable[[str], bool] = is_secret_name) -> str:
    """Replace values whose name marks them as secret: ``name=value``, ``name: 'value'``, JSON and
    YAML with or without escapes, ``--name value``. Quotes stay, so that JSON stays valid."""
    if "=" in text or ":" in text:
        text = _replace_values(text, _ASSIGNMENT, _BARE_VALUE, hidden, private)
    if "-" in text:
        text = _replace_values(text, _OPTION, _WORD, hidden, private)
    return text


def _replace_values(
    text: str,
    names: re.Pattern[str],
    bare: re.Pattern[str],
    hidden: str,
    private: Callable[[str], bool],
) -> str:
    parts: list[str] = []
    done = position = 0
    while (match := names.search(text, position)) is not None:
        position = match.end()
        if not private(match[1]):
            continue
        start, end = _find_value(text, position, bare)
        if end > start:
            parts += [text[done:start], hidden]
            done = position = end
    return "".join([*parts, text[done:]]) if parts else text


def _find_value(text: str, at: int, bare: re.Pattern[str]) -> tuple[int, int]:
    """Return the start and end of the value that begins at ``at``, without its quotes."""
    quote = _QUOTE.match(text, at)
    if quote is not None:
        return quote.end(), _find_closing(text, quote)
    block = _BLOCK.match(text, at)
    if block is not None:
        return block.end(1), block.end()
    if text[at : at + 1] in ("[", "{"):
        depth = 0
        for bracket in _BRACKET.finditer(text, at):
            depth += 1 if bracket[0] in "[{" else -1
            if depth == 0:
                return at, bracket.end()
        return at, len(text)
    word = bare.match(text, at)
    return at, at if word is None else word.end()


def _find_closing(text: str, opening: re.Match[str]) -> int:
    """Return the end of the text after a quote. In text that was escaped n times, a quote has 2^n -
    1 backslashes. Quotes in its contents have 2^(n+1) - 1, and all other text is part of it."""
    level = len(opening[0]) - 1
    for quote in _QUOTE.finditer(text, opening.end()):
        slashes = len(quote[0]) - 1
        if quote[0][-1] == opening[0][-1] and (
            slashes < level or slashes % (2 * (level + 1)) == level
        ):
            return quote.start() + (slashes - level if slashes > level else 0)
    return len(text)


# -- command lines and settings -----------------------------------------------------------------

HIDDEN = "***"
_MAX_ARGUMENTS, _MAX_LENGTH = 512, 2000

_QUERY = re.compile(r"(?i)([?&;][\w.-]{0,80}?(?:key|auth))=[^&#;\s]++")
"""URL parameters with a credential. In a URL, any key counts as one."""
_HEADER = re.compile(r"(?i)\b(bearer|basic|token)\s++[\w.~+/=-]{8,}")
_PAIR = re.compile(r"^(?P<name>[^=\s]{1,200})=(?P<value>.*)$", re.DOTALL)


def clean_value(value: str) -> str:
    """Return a value of limited length, without credentials in URLs, headers, JSON or known
    formats."""
    if len(value) > 4 * _MAX_LENGTH:  # text that is cut off need not be scanned
        value = value[: 4 * _MAX_LENGTH]
    value = hide_known(value, HIDDEN)
    value = _QUERY.sub(rf"\1={HIDDEN}", value)
    value = hide_values(value, HIDDEN)
    value = _HEADER.sub(rf"\1 {HIDDEN}", value)
    return value if len(value) <= _MAX_LENGTH else f"{value[:_MAX_LENGTH]}…"


def clean_command(arguments: Sequence[str]) -> list[str]:
    """Return a command line with credentials replaced: values of options whose names mark them, and
    texts of known formats. Code given with ``-c`` is left out."""
    result: list[str] = []
    hide = ""
    for argument in list(arguments)[:_MAX_ARGUMENTS]:
        if hide and not (hide == "option" and argument.startswith("-")):
            result.append("…" if hide == "code" else HIDDEN)
            hide = ""
            continue
        hide = ""
        pair = _PAIR.match(argument)
        if pair is not None and is_secret_name(pair["name"]):
            result.append(f"{clean_value(pair['name'])}={HIDDEN}")
            continue
        if argument == "-c" and len(result) == 1:
            hide = "code"
        elif argument.startswith("-") and pair is None and is_secret_name(argument):
            hide = "option"
        result.append(clean_value(argument))
    if len(arguments) > _MAX_ARGUMENTS:
        result.append("…")
    return result
