"""Write the files of ``tests/graph/onnx/keras/``: networks of Keras, as tf2onnx writes them, with losses.

    pip install tensorflow-cpu==2.21.0 keras==3.15.1 tf2onnx==1.17.0
    python tests/graph/onnx/make_keras_files.py tests/graph/onnx/keras

No test runs it; the files are committed. ``NAME.onnx`` is a network in float32. ``NAME.npz`` has a batch
``x``, labels ``y``, and ``losses``: cross entropy in ``STEPS`` steps of SGD on that batch, by Keras in
float64 (``volume``: float32) from the same weights. All weights are random, as those of a trained model: of
biases of zeros and scales of ones the exporter leaves nothing, which is what ``fresh`` shows.
"""

from __future__ import annotations

import os

os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
import tf2onnx
from keras import Input, Model, ops
from keras import layers as L

STEPS, RATE, BATCH, OPSET = 3, 0.1, 4, 18


def classifier() -> Model:
    """Depthwise and separable convolutions with BatchNorm, and a Dense head with softmax."""
    x = image = Input((12, 10, 3), name="image")
    x = L.Conv2D(8, 3, strides=2, padding="same", use_bias=False)(x)
    x = L.ReLU()(L.BatchNormalization()(x))
    x = L.DepthwiseConv2D(3, padding="same")(x)
    x = L.ReLU()(L.BatchNormalization()(x))
    x = L.MaxPooling2D()(L.SeparableConv2D(8, 3, padding="same", activation="elu")(x))
    return Model(image, L.Dense(5, activation="softmax")(L.Flatten()(x)))


def unet() -> Model:
    """A U-Net of images: UpSampling2D (nearest, bilinear), concatenation, softmax over the last axis."""
    image = Input((16, 12, 1), name="image")
    first = L.Conv2D(8, 3, padding="same", activation="relu")(image)
    second = L.Conv2D(8, 3, padding="same", activation="relu")(L.MaxPooling2D()(first))
    x = L.Conv2D(12, 3, padding="same", activation="relu")(L.MaxPooling2D()(second))
    x = L.Concatenate()([second, L.UpSampling2D()(x)])
    x = L.Conv2D(8, 3, padding="same", activation="relu")(x)
    x = L.Concatenate()([first, L.UpSampling2D(interpolation="bilinear")(x)])
    x = L.Conv2D(8, 3, padding="same", activation="relu")(x)
    return Model(image, L.Conv2D(3, 1, activation="softmax")(x))


def volume() -> Model:
    """A network of volumes: Conv3D, MaxPooling3D, Conv3DTranspose and UpSampling3D side by side."""
    x = Input((8, 12, 8, 1), name="volume")
    a = L.Conv3D(8, 3, padding="same", activation="relu")(x)
    b = L.Conv3D(8, 3, padding="same", activation="relu")(L.MaxPooling3D()(a))
    c = L.Conv3DTranspose(4, 3, strides=2, padding="same")(b)
    return Model(x, L.Conv3D(3, 1)(L.Concatenate()([a, c, L.UpSampling3D()(b)])))


def recurrent() -> Model:
    """An embedding, a bidirectional LSTM, a GRU, and a Dense head with softmax."""
    tokens = Input((9,), name="tokens", dtype="int32")
    x = L.Bidirectional(L.LSTM(6, return_sequences=True))(L.Embedding(20, 8)(tokens))
    return Model(tokens, L.Dense(4, activation="softmax")(L.GRU(6)(x)))


def mobile() -> Model:
    """Inverted residuals as in MobileNetV2: ZeroPadding2D, ReLU6, a depthwise convolution with stride."""
    x = image = Input((16, 16, 3), name="image")
    x = L.ZeroPadding2D(((0, 1), (0, 1)))(x)
    x = L.ReLU(6.0)(L.BatchNormalization()(L.Conv2D(8, 3, strides=2, use_bias=False)(x)))
    skip = x
    x = L.ReLU(6.0)(L.BatchNormalization()(L.Conv2D(16, 1, use_bias=False)(x)))
    x = L.ReLU(6.0)(L.BatchNormalization()(L.DepthwiseConv2D(3, padding="same", use_bias=False)(x)))
    x = L.Add()([skip, L.BatchNormalization()(L.Conv2D(8, 1, use_bias=False)(x))])
    x = L.DepthwiseConv2D(3, strides=2, use_bias=False)(L.ZeroPadding2D(1)(x))
    x = L.ReLU(6.0)(L.BatchNormalization()(x))
    x = L.Conv2D(4, 1)(L.GlobalAveragePooling2D(keepdims=True)(x))
    return Model(image, L.Softmax()(L.Reshape((4,))(x)))


def transformer() -> Model:
    """A block of a language model: causal MultiHeadAttention and LayerNormalization."""
    tokens = Input((7,), name="tokens", dtype="int32")
    x = L.Embedding(20, 8)(tokens)
    y = L.LayerNormalization()(x)
    x = L.Add()([x, L.MultiHeadAttention(2, 4)(y, y, use_causal_mask=True)])
    y = L.Dense(16, activation=lambda z: ops.gelu(z, approximate=True))(L.LayerNormalization()(x))
    return Model(tokens, L.Dense(20)(L.Add()([x, L.Dense(8)(y)])))


@dataclass(frozen=True)
class File:
    """How one file is made."""

    make: Callable[[], Model]
    way: str
    """``from_keras``, ``export`` (of the model), or ``training``: tf2onnx, and the model in training mode."""
    shape: tuple[int, ...]
    """Of a sample; of whole numbers, if it has one axis."""
    labels: tuple[int, ...] = ()
    """Shape of the labels of a sample."""
    fresh: bool = False
    """Whether weights are left as Keras starts them."""
    precision: str = "float64"
    """Of the losses: TensorFlow pools volumes in float32 only."""


FILES = {
    "classifier-training": File(classifier, "training", (12, 10, 3)),
    "classifier": File(classifier, "from_keras", (12, 10, 3)),
    "unet": File(unet, "from_keras", (16, 12, 1), (16, 12)),
    "volume": File(volume, "export", (8, 12, 8, 1), (8, 12, 8), precision="float32"),
    "recurrent": File(recurrent, "from_keras", (9,)),
    "mobile": File(mobile, "training", (16, 16, 3)),
    "mobile-export": File(mobile, "export", (16, 16, 3)),
    "transformer": File(transformer, "export", (7,), (7,)),
    "fresh": File(unet, "from_keras", (16, 12, 1), (16, 12), fresh=True),
}


def randomize(model: Model) -> None:
    """Move every weight off what it starts with; variances stay positive."""
    random = np.random.default_rng(1)
    for weight in model.weights:
        moved = weight.numpy() + random.normal(scale=0.1, size=weight.shape)
        weight.assign(np.abs(moved) + 0.5 if "variance" in weight.path else moved)


def write(model: Model, way: str, path: Path) -> None:
    """Export a model."""
    if way == "export":
        model.export(path, format="onnx", verbose=False)
    elif way == "from_keras":
        tf2onnx.convert.from_keras(model, opset=OPSET, output_path=str(path))
    else:
        call = tf.function(lambda x: model(x, training=True))
        given = [tf.TensorSpec(item.shape, item.dtype, name=item.name) for item in model.inputs]
        tf2onnx.convert.from_function(call, input_signature=given, opset=OPSET, output_path=str(path))


def losses_of(model: Model, x: np.ndarray, y: np.ndarray, training: bool) -> list[float]:
    """Train as Keras does, and return the losses before each step."""
    ends_in_softmax = "oftmax" in f"{getattr(model.layers[-1], 'activation', '')}{model.layers[-1].name}"
    losses = []
    for _ in range(STEPS):
        with tf.GradientTape() as tape:
            made = model(x, training=training)
            each = keras.losses.sparse_categorical_crossentropy(y, made, from_logits=not ends_in_softmax)
            loss = ops.mean(each)
        weights = [variable.value for variable in model.trainable_variables]
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(RATE * tf.convert_to_tensor(gradient))
        losses.append(float(loss))
    return losses


def main(folder: Path) -> None:
    """Write all files."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, file in FILES.items():
        keras.utils.set_random_seed(0)
        keras.backend.clear_session()
        keras.config.set_floatx("float32")
        keras.config.set_dtype_policy("float32")
        model = file.make()
        if not file.fresh:
            randomize(model)
        model(tf.zeros((1, *file.shape), model.inputs[0].dtype))  # ``export`` asks for it
        write(model, file.way, folder / f"{name}.onnx")
        random = np.random.default_rng(0)
        x = random.normal(size=(BATCH, *file.shape)).astype("float32")
        if len(file.shape) == 1:
            x = random.integers(20, size=(BATCH, *file.shape)).astype("int32")
        y = random.integers(model.output.shape[-1], size=(BATCH, *file.labels))
        keras.config.set_floatx(file.precision)
        keras.config.set_dtype_policy(file.precision)
        exact = file.make()
        exact.set_weights(model.get_weights())
        losses = losses_of(exact, x, y, file.way == "training")
        np.savez_compressed(folder / f"{name}.npz", x=x, y=y.astype("uint8"), losses=losses)
        print(name, losses, (folder / f"{name}.onnx").stat().st_size, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
