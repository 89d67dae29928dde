"""CoMoE: LoRA experts with a top-k router beside linear layers, and a contrastive loss that keeps
them distinct.

"CoMoE: Contrastive Representation for Mixture-of-Experts in Parameter-Efficient Fine-tuning" (Feng
et al., 2025).

- `layer.py`: the experts and their router (equations 1 to 3), put into a model, saved and loaded;
- `contrastive.py`: Algorithm 1 (equations 10 to 12), and the bound of the information gap (theorem
  1);
- `training.py`: cross entropy with the contrastive loss (equation 13);
- `evaluating.py` and `report.py`: use of the experts by task (figures 4 to
  7);
- `cost.py`: time and memory (table 8);
- `options.py` has the options, `command.py` the commands.
"""
