"""The training forward against the transformers class, and its gradients."""

from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from models.nano.config import CONFIG  # noqa: E402
from models.nano.tokenizer import FIRST_IMAGE_INDEX, IDS  # noqa: E402
from models.nano.train.delta import affine_scan, gated_delta, unit_lower_inverse  # noqa: E402
from models.nano.train.forward import Forward, make_tables, padded_length, page_ids  # noqa: E402
from models.nano.train.weights import initial_weights  # noqa: E402


def reference(weights: dict[str, Any]) -> Any:  # noqa: ANN401 a class of transformers
    config = transformers.Qwen3_5Config(**CONFIG)
    model = transformers.Qwen3_5ForConditionalGeneration(config).float().eval()
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert missing in ([], ["lm_head.weight"])
    assert not unexpected
    model.tie_weights()
    return model


@pytest.fixture(scope="module")
def weights() -> dict[str, Any]:
    weights = initial_weights(seed=3)
    generator = torch.Generator().manual_seed(4)
    for value in weights.values():  # biases and norms away from their neutral values
        value.add_(torch.randn(value.shape, generator=generator), alpha=0.02)
    return weights


@pytest.mark.parametrize(("height", "width"), [(96, 256), (160, 96)])
def test_logits_are_those_of_transformers(weights: dict[str, Any], height: int, width: int) -> None:
    num_patches = height * width // 256
    num_image = num_patches // 4
    length = padded_length(num_image, 70)
    texts = torch.randint(0, 384, (2, 70))
    ids = page_ids(texts, num_image, length)
    patches = torch.rand(2, num_patches, 768) * 2 - 1
    tables = make_tables(height, width, length, torch.device("cpu"))
    none = torch.full(ids.shape, -1)
    forward = Forward(torch.float32)
    with torch.no_grad():
        _, image = forward.vision(weights, patches, tables)
        logits, _ = forward.text(weights, ids, image, tables, [none, none])
        frames = patches.reshape(-1, 3, 1, 256).repeat(1, 1, 2, 1).reshape(-1, 1536)
        grid = torch.tensor([[1, height // 16, width // 16]] * 2)
        want = reference(weights)(
            input_ids=ids,
            pixel_values=frames,
            image_grid_thw=grid,
            mm_token_type_ids=(ids == IDS["<|image_pad|>"]).int(),
            use_cache=False,
        ).logits
    torch.testing.assert_close(logits, want, atol=2e-5 * want.abs().max().item(), rtol=0)


def test_delta_rule_and_its_gradients_are_those_of_the_recurrence() -> None:
    shape, dtype = (1, 2, 128, 8), torch.float64
    q, k, v = (torch.randn(shape, dtype=dtype) for _ in range(3))
    k = torch.nn.functional.normalize(k, dim=-1)
    k[:, :, 5:9] = k[:, :, 5:6]  # equal keys, as blank paper gives
    g = -torch.rand(shape[:3], dtype=dtype) * 0.3
    beta = torch.rand(shape[:3], dtype=dtype)
    inputs = [x.requires_grad_() for x in (q, k, v, g, beta)]
    state = torch.zeros(1, 2, 8, 8, dtype=dtype)
    outs = []
    for t in range(shape[2]):
        kt, qt = k[:, :, t, :, None], q[:, :, t, None]
        state = state * g[:, :, t, None, None].exp()
        error = beta[:, :, t, None, None] * (v[:, :, t, None] - kt.transpose(-1, -2) @ state)
        state = state + kt @ error
        outs.append(qt @ state)
    want = torch.cat(outs, 2)
    got = gated_delta(*inputs)
    torch.testing.assert_close(got, want, atol=1e-10, rtol=1e-8)
    seed = torch.randn(want.shape, dtype=dtype)
    got_grads = torch.autograd.grad((got * seed).sum(), inputs)
    want_grads = torch.autograd.grad((want * seed).sum(), inputs)
    for got_grad, want_grad in zip(got_grads, want_grads, strict=True):
        torch.testing.assert_close(got_grad, want_grad, atol=1e-9, rtol=1e-7)


def test_operators_have_right_gradients() -> None:
    strict = torch.randn(2, 5, 5, dtype=torch.float64).tril(-1).requires_grad_()
    assert torch.autograd.gradcheck(lambda a: unit_lower_inverse(a.tril(-1)), strict)
    transitions = torch.randn(4, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    increments = torch.randn(4, 2, 3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(affine_scan, (transitions, increments))


def test_guide_loss_is_that_of_a_softmax_over_the_past(weights: dict[str, Any]) -> None:
    length = padded_length(4, 20)
    tables = make_tables(64, 64, length, torch.device("cpu"))
    ids = page_ids(torch.randint(0, 384, (1, 20)), 4, length)
    image = torch.randn(1, 4, 256)
    query = FIRST_IMAGE_INDEX + 10
    total = torch.zeros(4)
    for key in range(query + 1):
        target = torch.full((1, length), -1)
        target[0, query] = key
        with torch.no_grad():
            _, guides = Forward(torch.float32).text(weights, ids, image, tables, [target, target])
        total += torch.exp(-guides)
    torch.testing.assert_close(total, torch.ones(4), atol=1e-4, rtol=0)
