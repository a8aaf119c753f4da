"""Search QA: answer a question by asking a search engine first (Search-R1). The environment is in ``env``."""
