"""The DeepSpeed learner group: packing, update, publish, checkpoint."""
