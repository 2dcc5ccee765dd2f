"""Distil drafts for a target of your own: let the target write text, and train small drafts to foresee it.

    python -m examples.distil --kind eagle --kind dflash --minutes 9 --out drafts

Nothing is downloaded. The target writes the text itself, from the beginnings of what the installed Python documents about itself and
from opened chat turns, so that the drafts learn what they will be asked to foresee. The texts are written once; then each kind of draft is
trained on them for the same time, and saved in a folder of its name. A saved draft is trained further with `--start FILE`. Kinds:

* `standalone`: some of the target's own layers as a small language model with KV of its own;
* `parallel`: the same, with mask tokens behind the newest one, so that one pass foresees several tokens (PARD);
* `medusa`: residual blocks over the target's last hidden state, one for each token ahead;
* `eagle`: one layer over the newest token and the target's last hidden state, run once a token;
* `eagle3`: one layer over the newest token and hidden states from several depths of the target;
* `mtp`: one layer as in modules for multi-token prediction, with norms of its own over what it reads;
* `dflash`: two layers over a block of mask tokens, with hidden states of the target as keys and values before it.

All of them share the target's embedding and output matrix, which are not trained and not saved. The target is SmolLM2-135M-Instruct, or
with `--target` a plain Llama in a directory of Hugging Face transformers. `examples.distil.drafts.load` makes a drafter of a saved draft.
"""
