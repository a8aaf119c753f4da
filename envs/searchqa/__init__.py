"""Search QA: answer a question by asking a search engine first (Search-R1). The environment is in ``env``."""

try:
    import bm25s  # noqa: F401
    import Stemmer  # noqa: F401
except ImportError as error:
    raise ImportError(
        "searchqa needs bm25s and PyStemmer; install them with: pip install 'asyncrl[searchqa]'"
    ) from error
