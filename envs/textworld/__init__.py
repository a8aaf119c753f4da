"""TextWorld (Côté et al. 2018): text adventures, generated. The environment is in ``env``."""
