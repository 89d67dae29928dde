"""One thread for each test process: the models are tiny and the processes many."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("HF_HUB_DISABLE_XET", "1")

import torch
from transformers.utils import logging

torch.set_num_threads(1)
logging.set_verbosity_error()
logging.disable_progress_bar()
