"""mini's factory: its corpus, tokenizer, figures and card. Run from a clone: `python -m
recipes.mini.corpus`. Training itself is `training.pretrain`."""
