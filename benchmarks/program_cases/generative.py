"""Generative programs: autoencoders, flows, adversarial and diffusion losses, scenes, with and without libraries."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from benchmarks.exactness_cases.case import Expected, Training
from benchmarks.program_cases.program import BATCH, ROWS, Fit, Program, batches

HIDDEN = "draws from TensorFlow's hidden state"


def points(rows: int = 3 * BATCH, width: int = 4, seed: int = 0) -> Any:
    """Return floats [rows, width]."""
    return np.random.default_rng(seed).normal(size=(rows, width))


class Sampling(layers.Layer):
    """Draws from the normal distribution of a mean and a log variance."""

    def __init__(self) -> None:
        super().__init__()
        self.draws = keras.random.SeedGenerator(1337)

    def call(self, inputs: Any) -> Any:
        mean, log_variance = inputs
        noise = keras.random.normal(ops.shape(mean), seed=self.draws, dtype=mean.dtype)
        return mean + ops.exp(0.5 * log_variance) * noise


class Divergence(layers.Layer):
    """Adds the divergence from a standard normal distribution to the loss."""

    def call(self, inputs: Any) -> Any:
        mean, log_variance = inputs
        each = -0.5 * (1 + log_variance - ops.square(mean) - ops.exp(log_variance))
        self.add_loss(ops.mean(ops.sum(each, 1)))
        return inputs


def variational_autoencoder() -> Fit:
    """A convolutional VAE as one functional model, whose KL divergence a layer adds."""
    entry = keras.Input((8, 8, 1))
    x = layers.Flatten()(layers.Conv2D(4, 3, 2, padding="same", activation="relu")(entry))
    code = Divergence()([layers.Dense(2)(x), layers.Dense(2)(x)])
    x = layers.Reshape((4, 4, 4))(layers.Dense(64, "relu")(Sampling()(code)))
    x = layers.Conv2DTranspose(1, 3, 2, padding="same", activation="sigmoid")(x)
    model = keras.Model(entry, x)
    model.compile(keras.optimizers.Adam(0.01), lambda a, b: ops.sum(keras.losses.binary_crossentropy(a, b), (1, 2)))
    x = np.random.default_rng(0).random((ROWS, 8, 8, 1))
    return Fit(model, x, x, {"batch_size": BATCH, "epochs": 2})


class Codebook(layers.Layer):
    """The nearest of a table's vectors, with a gradient that passes straight through and two losses."""

    def __init__(self, number: int, width: int, beta: float = 0.25) -> None:
        super().__init__()
        self.number, self.width, self.beta = number, width, beta
        self.table = self.add_weight(shape=(width, number), initializer="random_uniform", name="table")

    def call(self, x: Any) -> Any:
        flat = tf.reshape(x, [-1, self.width])
        distance = tf.reduce_sum(flat**2, 1, keepdims=True) + tf.reduce_sum(self.table**2, 0) - 2 * flat @ self.table
        chosen = tf.one_hot(tf.argmin(distance, 1), self.number, dtype=x.dtype)
        found = tf.reshape(tf.matmul(chosen, self.table, transpose_b=True), tf.shape(x))
        self.add_loss(self.beta * tf.reduce_mean((tf.stop_gradient(found) - x) ** 2))
        self.add_loss(tf.reduce_mean((found - tf.stop_gradient(x)) ** 2))
        return x + tf.stop_gradient(found - x)


def vector_quantised() -> Fit:
    """VQ-VAE: images as entries of a table."""
    entry = keras.Input((8, 8, 1))
    x = layers.Conv2D(4, 3, 2, padding="same", activation="relu")(entry)
    x = Codebook(6, 3)(layers.Conv2D(3, 1)(x))
    x = layers.Conv2DTranspose(4, 3, 2, padding="same", activation="relu")(x)
    model = keras.Model(entry, layers.Conv2DTranspose(1, 3, padding="same")(x))
    model.compile("adam", "mse")
    x = np.random.default_rng(0).random((ROWS, 8, 8, 1))
    return Fit(model, x, x, {"batch_size": BATCH, "epochs": 2})


class MaskedConvolution(layers.Layer):
    """A convolution that sees the pixels above and to the left; kind A does not see its own pixel."""

    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__()
        self.kind, self.convolution = kind, layers.Conv2D(**options)

    def build(self, shape: Any) -> None:
        self.convolution.build(shape)
        size = self.convolution.kernel_size[0]
        mask = np.zeros(self.convolution.kernel.shape)
        mask[: size // 2] = 1.0
        mask[size // 2, : size // 2 + (self.kind == "B")] = 1.0
        self.mask = mask

    def call(self, x: Any) -> Any:
        self.convolution.kernel.assign(self.convolution.kernel * self.mask)
        return self.convolution(x)


def pixel_by_pixel() -> Fit:
    """PixelCNN: masked kernels, which each call writes, and residual blocks; every pixel is predicted from earlier."""
    entry = keras.Input((6, 6, 1))
    x = MaskedConvolution("A", filters=6, kernel_size=5, activation="relu", padding="same")(entry)
    for _ in range(2):
        y = MaskedConvolution("B", filters=3, kernel_size=3, activation="relu", padding="same")(x)
        x = layers.add([x, layers.Conv2D(6, 1, activation="relu")(y)])
    model = keras.Model(entry, layers.Conv2D(1, 1, activation="sigmoid")(x))
    model.compile(keras.optimizers.Adam(0.0005), "binary_crossentropy")
    x = (np.random.default_rng(0).random((ROWS, 6, 6, 1)) < 0.33).astype("float64")
    return Fit(model, x, x, {"batch_size": BATCH, "epochs": 2, "validation_split": 0.1})


def coupling(width: int) -> Any:
    """Return a network of the scale and the shift of half of the features."""
    entry = keras.Input((width,))
    x = layers.Dense(8, "relu", kernel_regularizer=keras.regularizers.l2(0.01))(entry)
    shift = layers.Dense(width, kernel_regularizer=keras.regularizers.l2(0.01))(x)
    return keras.Model(entry, [layers.Dense(width, "tanh")(x), shift])


def real_nvp() -> Training:
    """A normalising flow by hand: masks by turns, log determinants, regularisers in the loss."""
    nets = [coupling(2) for _ in range(4)]
    masks = [tf.constant([[float(i % 2), float((i + 1) % 2)]], tf.float64) for i in range(4)]

    @tf.function
    def loss_fn(x: Any) -> Any:
        determinant = 0.0
        for net, mask in zip(nets, masks, strict=True):
            scale, shift = net(x * mask)
            scale, shift = scale * (1 - mask), shift * (1 - mask)
            x = (x - shift) * tf.exp(-scale) * (1 - mask) + x * mask
            determinant -= tf.reduce_sum(scale, 1)
        likelihood = -0.5 * tf.reduce_sum(x**2, 1) - np.log(2 * np.pi) + determinant
        return -tf.reduce_mean(likelihood) + tf.add_n([loss for net in nets for loss in net.losses])

    trained = [variable for net in nets for variable in net.trainable_variables]
    return Training(loss_fn, keras.optimizers.Adam(0.001), trained, batches(points(width=2)))


def flow_of_a_library() -> Training:
    """A masked autoregressive flow of tensorflow_probability, trained by its log likelihood."""
    import tensorflow_probability as tfp

    made = [
        tfp.bijectors.AutoregressiveNetwork(params=2, hidden_units=[8], activation="tanh", dtype="float64")
        for _ in range(2)
    ]
    chain = []
    for net in made:
        net.build((None, 3))
        chain += [tfp.bijectors.MaskedAutoregressiveFlow(net), tfp.bijectors.Permute([2, 1, 0])]
    base = tfp.distributions.Sample(tfp.distributions.Normal(np.float64(0), np.float64(1)), [3])
    flow = tfp.distributions.TransformedDistribution(base, tfp.bijectors.Chain(chain))

    @tf.function
    def loss_fn(x: Any) -> Any:
        return -tf.reduce_mean(flow.log_prob(x))

    trained = [variable for net in made for variable in net.trainable_variables]
    return Training(loss_fn, keras.optimizers.Adam(0.01), trained, batches(points(width=3)))


def variational_autoencoder_of_a_library() -> Training:
    """A VAE whose code and images are distributions of tensorflow_probability, with a seed for each step."""
    import tensorflow_probability as tfp

    encoder = keras.Sequential([keras.Input((4,)), layers.Dense(8, "relu"), layers.Dense(4)])
    decoder = keras.Sequential([keras.Input((2,)), layers.Dense(8, "relu"), layers.Dense(4)])
    prior = tfp.distributions.MultivariateNormalDiag(tf.zeros(2, tf.float64))
    number = tf.Variable(0, trainable=False, name="number")

    @tf.function
    def loss_fn(x: Any) -> Any:
        mean, scale = tf.split(encoder(x), 2, -1)
        code = tfp.distributions.MultivariateNormalDiag(mean, tf.nn.softplus(scale))
        z = code.sample(seed=tf.stack([number.assign_add(1), 7]))
        images = tfp.distributions.Independent(tfp.distributions.Bernoulli(logits=decoder(z)), 1)
        divergence = code.log_prob(z) - prior.log_prob(z)
        return tf.reduce_mean(divergence - images.log_prob(tf.cast(x > 0, x.dtype)))

    trained = [*encoder.trainable_variables, *decoder.trainable_variables]
    return Training(loss_fn, keras.optimizers.Adam(0.01), trained, batches(points()))


def bayesian_regression() -> Training:
    """Weights as distributions: a draw of them for each step, and their divergence over the number of samples."""
    mean = [tf.Variable(points(4, 8, 1) / 2, name="mean_0"), tf.Variable(points(8, 2, 2) / 2, name="mean_1")]
    spread = [
        tf.Variable(tf.fill(m.shape, tf.constant(-3.0, tf.float64)), name=f"spread_{i}") for i, m in enumerate(mean)
    ]
    number = tf.Variable(0, trainable=False, name="number")

    @tf.function
    def loss_fn(x: Any, y: Any) -> Any:
        seed, divergence, h = number.assign_add(1), 0.0, x
        for i, (m, s) in enumerate(zip(mean, spread, strict=True)):
            scale = tf.nn.softplus(s)
            h = tf.tanh(h) @ (m + scale * tf.random.stateless_normal(m.shape, tf.stack([seed, i]), dtype=m.dtype))
            divergence += tf.reduce_sum(0.5 * (scale**2 + m**2 - 1) - tf.math.log(scale))
        guess, log_scale = tf.unstack(h, axis=-1)
        likelihood = -0.5 * tf.square((y - guess) * tf.exp(-log_scale)) - log_scale
        return -tf.reduce_mean(likelihood) + divergence / 1000

    return Training(loss_fn, keras.optimizers.Adam(0.01), [*mean, *spread], batches(points(), points()[:, 0]))


def denoising_diffusion() -> Training:
    """DDPM: noise of a drawn time is added, the network with an embedding of the time gives the noise back."""
    beta = np.linspace(1e-4, 0.02, 50)
    kept = tf.constant(np.cumprod(1 - beta))
    draws = keras.random.SeedGenerator(5)
    entry, time = keras.Input((8, 8, 1)), keras.Input((), dtype="int32")
    place = layers.Dense(6, "swish")(layers.Embedding(50, 6)(time))
    x = layers.Conv2D(6, 3, padding="same")(entry) + layers.Reshape((1, 1, 6))(place)
    x = layers.Activation("swish")(layers.GroupNormalization(2)(x))
    model = keras.Model([entry, time], layers.Conv2D(1, 3, padding="same", kernel_initializer="zeros")(x))

    @tf.function
    def loss_fn(image: Any) -> Any:
        rows = tf.shape(image)[0]
        time = keras.random.randint((rows,), 0, 50, seed=draws)
        noise = keras.random.normal(tf.shape(image), seed=draws, dtype=image.dtype)
        share = tf.reshape(tf.gather(kept, time), [rows, 1, 1, 1])
        noisy = tf.sqrt(share) * image + tf.sqrt(1 - share) * noise
        return tf.reduce_mean(tf.square(model([noisy, time], training=True) - noise))

    images = np.random.default_rng(0).random((3 * BATCH, 8, 8, 1))
    return Training(loss_fn, keras.optimizers.Adam(0.002), model.trainable_variables, batches(images))


def critic_with_gradient_penalty() -> Training:
    """WGAN-GP's critic: the norm of its gradient between real and made samples, by a tape inside the loss."""
    critic = keras.Sequential(
        [keras.Input((4,)), layers.Dense(8), layers.LeakyReLU(negative_slope=0.2), layers.Dense(1)]
    )
    draws = keras.random.SeedGenerator(11)

    @tf.function
    def loss_fn(real: Any, fake: Any) -> Any:
        share = keras.random.uniform((tf.shape(real)[0], 1), seed=draws, dtype=real.dtype)
        between = real + share * (fake - real)
        with tf.GradientTape() as tape:
            tape.watch(between)
            score = critic(between, training=True)
        norm = tf.sqrt(tf.reduce_sum(tf.square(tape.gradient(score, between)), 1) + 1e-12)
        cost = tf.reduce_mean(critic(fake, training=True)) - tf.reduce_mean(critic(real, training=True))
        return cost + 10.0 * tf.reduce_mean((norm - 1.0) ** 2)

    data = batches(points(), points(seed=1))
    return Training(loss_fn, keras.optimizers.Adam(0.0002, 0.5, 0.9), critic.trainable_variables, data)


class NoiseAndLabel(layers.Layer):
    """Gives each label, one of three, as zeros and a one, beside noise from TensorFlow's hidden state."""

    def call(self, label: Any) -> Any:
        noise = tf.random.normal([tf.shape(label)[0], 3], dtype=self.compute_dtype)
        return tf.concat([noise, tf.one_hot(label, 3, dtype=noise.dtype)], 1)


def images_from_noise() -> Fit:
    """A conditional generator that learns to please a frozen discriminator."""
    generator = keras.Sequential([keras.Input((6,)), layers.Dense(16, "relu"), layers.Reshape((4, 4, 1))])
    generator.add(layers.Conv2DTranspose(1, 3, 2, padding="same", activation="tanh"))
    judge = keras.Sequential(
        [keras.Input((8, 8, 1)), layers.Conv2D(3, 3, 2, activation="relu"), layers.Flatten(), layers.Dense(1)]
    )
    judge.trainable = False
    label = keras.Input((), dtype="int32")
    model = keras.Model(label, judge(generator(NoiseAndLabel()(label))))
    model.compile(keras.optimizers.Adam(0.0002), keras.losses.BinaryCrossentropy(from_logits=True))
    return Fit(model, np.arange(ROWS, dtype="int32") % 3, np.ones((ROWS, 1)), {"batch_size": BATCH, "epochs": 2})


def radiance_field() -> Training:
    """NeRF: points along rays, their places as sines, colours and densities composed from front to back."""
    entry = keras.Input((6, 3 + 12))
    x = y = layers.Dense(8, "relu")(entry)
    x = layers.Dense(8, "relu")(layers.Concatenate()([layers.Dense(8, "relu")(x), entry]))
    model = keras.Model(entry, layers.Dense(4)(x + y))

    @tf.function
    def loss_fn(origin: Any, direction: Any, depth: Any, colour: Any) -> Any:
        place = origin[:, None] + direction[:, None] * depth[..., None]
        parts = [place]
        for i in range(2):
            parts += [tf.sin(2.0**i * place), tf.cos(2.0**i * place)]
        raw = model(tf.concat(parts, -1), training=True)
        rgb, density = tf.sigmoid(raw[..., :3]), tf.nn.relu(raw[..., 3])
        step = tf.concat(
            [depth[:, 1:] - depth[:, :-1], tf.fill([tf.shape(depth)[0], 1], tf.constant(1e10, depth.dtype))], 1
        )
        opaque = 1 - tf.exp(-density * step)
        weight = opaque * tf.math.cumprod(1 - opaque + 1e-10, axis=-1, exclusive=True)
        return tf.reduce_mean(tf.square(tf.reduce_sum(weight[..., None] * rgb, 1) - colour))

    rng = np.random.default_rng(0)
    depth = np.sort(rng.uniform(2, 6, (3 * BATCH, 6)))
    data = batches(points(width=3), points(width=3, seed=1), depth, rng.random((3 * BATCH, 3)))
    return Training(loss_fn, keras.optimizers.Adam(0.01), model.trainable_variables, data)


def mixture_density() -> Fit:
    """A mixture of normal distributions as the output, with a negative log likelihood of the user's own."""

    def likelihood(y_true: Any, y_pred: Any) -> Any:
        share, mean, log_scale = ops.split(y_pred, 3, axis=-1)
        each = -0.5 * ops.square((y_true - mean) * ops.exp(-log_scale)) - log_scale
        return -ops.logsumexp(ops.log_softmax(share) + each, axis=-1)

    entry = keras.Input((4,))
    x = layers.Dense(8, "tanh")(layers.GaussianNoise(0.1, seed=3)(entry))
    model = keras.Model(entry, layers.Dense(9)(x))
    model.compile(keras.optimizers.Adam(0.01), likelihood)
    return Fit(model, points(ROWS), points(ROWS)[:, :1], {"batch_size": BATCH, "epochs": 2})


def energies_and_noise() -> Training:
    """Score matching: the divergence of the score is estimated by a product with given directions (sliced)."""
    score = keras.Sequential(
        [keras.Input((4,)), layers.Dense(8, "softplus"), layers.Dense(8, "softplus"), layers.Dense(4)]
    )

    @tf.function
    def loss_fn(x: Any, direction: Any) -> Any:
        with tf.autodiff.ForwardAccumulator(x, direction) as forward:
            s = score(x)
        along = tf.reduce_sum(direction * forward.jvp(s), 1)
        return tf.reduce_mean(along + 0.5 * tf.reduce_sum(tf.square(s), 1))

    data = batches(points(), np.sign(points(seed=1)))
    return Training(loss_fn, keras.optimizers.Adam(0.01), score.trainable_variables, data)


PROGRAMS = (
    Program(variational_autoencoder, ranks=True),
    Program(vector_quantised, ranks=True),
    Program(pixel_by_pixel),
    Program(real_nvp, ranks=True),
    Program(flow_of_a_library, needs="tensorflow_probability"),
    Program(variational_autoencoder_of_a_library, needs="tensorflow_probability", ranks=True),
    Program(bayesian_regression),
    Program(denoising_diffusion, ranks=True),
    Program(critic_with_gradient_penalty, ranks=True),
    Program(images_from_noise, Expected.DOCUMENTED, HIDDEN),
    Program(radiance_field, ranks=True),
    Program(mixture_density),
    Program(energies_and_noise),
)
