"""Distil a draft for a target of your own: let the target write text, and train a small draft to foresee it.

    python -m examples.distil --kind eagle3 --minutes 9 --out drafts

Nothing is downloaded. The target writes the text itself, from the beginnings of what the installed Python documents about itself and
from opened chat turns, so that the draft learns what it will be asked to foresee. Three kinds of draft can be trained:

* `standalone`: some of the target's own layers as a small language model with KV of its own;
* `eagle`: one layer over the newest token and the target's last hidden state;
* `eagle3`: one layer over the newest token and hidden states from several depths of the target.

All of them share the target's embedding and output matrix, which are not trained and not saved.
"""
