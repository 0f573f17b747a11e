"""Shared fixtures: a tiny saved model for trainer tests, and nothing that touches the checkout's own data."""


import pytest



@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """Folder of a one-layer random model with the embedded tokenizer."""
    from sage_lib import embedded_model

    folder = tmp_path_factory.mktemp("tiny")
    shape = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
    embedded_model.create(folder, shape, limit=99, max_length=64, seed=0)
    return folder
