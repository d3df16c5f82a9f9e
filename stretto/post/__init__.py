"""Post-training stages: SFT, distillation, merging, evaluation suites, pipelines."""
