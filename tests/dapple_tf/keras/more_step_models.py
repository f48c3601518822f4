"""Models whose ``train_step`` is their own, of more kinds than ``step_models``: each returns a compiled model and data.

The networks are small. All is made anew, from the same seeds, at each call.
"""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

import dapple_tf as dapple

SAMPLES, BATCH = 20, 8


def rows(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=(SAMPLES, *shape))


def labels_of(n, seed=0):
    return np.random.default_rng(seed).integers(0, n, SAMPLES)


def images(seed=0, c=1):
    return 1 / (1 + np.exp(-rows(8, 8, c, seed=seed)))


def by_token(i, *widths):
    return keras.Sequential([keras.Input([None, i]), *(layers.Dense(w, "tanh") for w in widths)])


def disc(channels=1, last=None):
    return keras.Sequential(
        [
            keras.Input([8, 8, channels]),
            layers.Conv2D(2, 4, strides=2, padding="same"),
            layers.LeakyReLU(negative_slope=0.2),
            layers.Conv2D(3, 4, strides=2, padding="same"),
            layers.LeakyReLU(negative_slope=0.2),
            layers.Flatten(),
            layers.Dropout(0.2, seed=3),
            layers.Dense(1, activation=last),
        ],
        name="discriminator",
    )


def gen(dim, channels=1):
    return keras.Sequential(
        [
            keras.Input([dim]),
            layers.Dense(2 * 2 * 3),
            layers.Reshape([2, 2, 3]),
            layers.Conv2DTranspose(2, 4, strides=2, padding="same"),
            layers.LeakyReLU(negative_slope=0.2),
            layers.Conv2DTranspose(channels, 4, strides=2, padding="same", activation="sigmoid"),
        ],
        name="generator",
    )


def mlp(i, *widths, last=None):
    return keras.Sequential(
        [keras.Input([i]), *(layers.Dense(w, "tanh") for w in widths[:-1]), layers.Dense(widths[-1], last)]
    )


class Two(keras.Model):
    """Metrics by name."""

    def trackers(self, *names):
        self.own = {n: keras.metrics.Mean(name=n) for n in names}

    @property
    def metrics(self):
        return list(self.own.values())

    def logs(self, **values):
        for n, v in values.items():
            self.own[n].update_state(v)
        return {n: m.result() for n, m in self.own.items()}


# --- A conditional GAN


class ConditionalGAN(Two):
    def __init__(self):
        super().__init__()
        self.discriminator, self.generator, self.latent_dim = disc(1 + 3), gen(4 + 3), 4
        self.seed_generator = keras.random.SeedGenerator(1337)

    def compile(self, d_optimizer, g_optimizer, loss_fn):
        super().compile()
        self.d_optimizer, self.g_optimizer, self.loss_fn = d_optimizer, g_optimizer, loss_fn
        self.trackers("g_loss", "d_loss")

    def train_step(self, data):
        real_images, one_hot_labels = data
        image_one_hot_labels = one_hot_labels[:, :, None, None]
        image_one_hot_labels = ops.repeat(image_one_hot_labels, repeats=[8 * 8])
        image_one_hot_labels = ops.reshape(image_one_hot_labels, (-1, 8, 8, 3))
        batch_size = ops.shape(real_images)[0]
        latent = keras.random.normal(shape=(batch_size, self.latent_dim), seed=self.seed_generator)
        vector_labels = ops.concatenate([latent, one_hot_labels], axis=1)
        generated = self.generator(vector_labels)
        fake_and_labels = ops.concatenate([generated, image_one_hot_labels], -1)
        real_and_labels = ops.concatenate([real_images, image_one_hot_labels], -1)
        combined = ops.concatenate([fake_and_labels, real_and_labels], axis=0)
        labels = ops.concatenate([ops.ones((batch_size, 1)), ops.zeros((batch_size, 1))], axis=0)
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(labels, self.discriminator(combined))
        grads = tape.gradient(d_loss, self.discriminator.trainable_weights)
        self.d_optimizer.apply_gradients(zip(grads, self.discriminator.trainable_weights))
        latent = keras.random.normal(shape=(batch_size, self.latent_dim), seed=self.seed_generator)
        vector_labels = ops.concatenate([latent, one_hot_labels], axis=1)
        misleading = ops.zeros((batch_size, 1))
        with tf.GradientTape() as tape:
            fake = self.generator(vector_labels)
            predictions = self.discriminator(ops.concatenate([fake, image_one_hot_labels], -1))
            g_loss = self.loss_fn(misleading, predictions)
        grads = tape.gradient(g_loss, self.generator.trainable_weights)
        self.g_optimizer.apply_gradients(zip(grads, self.generator.trainable_weights))
        return self.logs(g_loss=g_loss, d_loss=d_loss)


def cgan():
    m = ConditionalGAN()
    m.compile(
        keras.optimizers.Adam(0.01), keras.optimizers.Adam(0.01), keras.losses.BinaryCrossentropy(from_logits=True)
    )
    return m, images(), np.eye(3)[labels_of(3)]


# --- WGAN-GP: two critic steps with a gradient penalty


class WGAN(keras.Model):
    def __init__(self):
        super().__init__()
        self.discriminator, self.generator, self.latent_dim = disc(), gen(3), 3
        self.d_steps, self.gp_weight = 2, 10.0
        self.seed = keras.random.SeedGenerator(3)

    def compile(self, d_optimizer, g_optimizer, d_loss_fn, g_loss_fn):
        super().compile()
        self.d_optimizer, self.g_optimizer, self.d_loss_fn, self.g_loss_fn = (
            d_optimizer,
            g_optimizer,
            d_loss_fn,
            g_loss_fn,
        )

    def normal(self, shape):
        return keras.random.normal(shape, seed=self.seed)

    def gradient_penalty(self, batch_size, real_images, fake_images):
        alpha = keras.random.uniform(shape=[batch_size, 1, 1, 1], minval=0.0, maxval=1.0, seed=self.seed)
        interpolated = real_images + alpha * (fake_images - real_images)
        with tf.GradientTape() as gp_tape:
            gp_tape.watch(interpolated)
            pred = self.discriminator(interpolated, training=True)
        grads = gp_tape.gradient(pred, [interpolated])[0]
        norm = tf.sqrt(tf.reduce_sum(tf.square(grads), axis=[1, 2, 3]))
        return tf.reduce_mean((norm - 1.0) ** 2)

    def train_step(self, real_images):
        if isinstance(real_images, tuple):
            real_images = real_images[0]
        batch_size = tf.shape(real_images)[0]
        for _ in range(self.d_steps):
            latent = self.normal((batch_size, self.latent_dim))
            with tf.GradientTape() as tape:
                fake = self.generator(latent, training=True)
                fake_logits = self.discriminator(fake, training=True)
                real_logits = self.discriminator(real_images, training=True)
                d_cost = self.d_loss_fn(real_img=real_logits, fake_img=fake_logits)
                gp = self.gradient_penalty(batch_size, real_images, fake)
                d_loss = d_cost + gp * self.gp_weight
            d_gradient = tape.gradient(d_loss, self.discriminator.trainable_variables)
            self.d_optimizer.apply_gradients(zip(d_gradient, self.discriminator.trainable_variables))
        latent = self.normal((batch_size, self.latent_dim))
        with tf.GradientTape() as tape:
            generated = self.generator(latent, training=True)
            g_loss = self.g_loss_fn(self.discriminator(generated, training=True))
        g = tape.gradient(g_loss, self.generator.trainable_variables)
        self.g_optimizer.apply_gradients(zip(g, self.generator.trainable_variables))
        return {"d_loss": d_loss, "g_loss": g_loss}


def wgan():
    m = WGAN()
    m.compile(
        keras.optimizers.Adam(0.01, 0.5, 0.9),
        keras.optimizers.Adam(0.01, 0.5, 0.9),
        lambda real_img, fake_img: tf.reduce_mean(fake_img) - tf.reduce_mean(real_img),
        lambda fake: -tf.reduce_mean(fake),
    )
    return m, images()


# --- SimCLR, with a linear probe


class Contrastive(keras.Model):
    def __init__(self):
        super().__init__()
        self.temperature = 0.1
        self.encoder, self.projection_head, self.linear_probe = mlp(5, 8, 6, last="tanh"), mlp(6, 6, 4), mlp(6, 3)
        self.seed = keras.random.SeedGenerator(5)

    def compile(self, contrastive_optimizer, probe_optimizer, **kw):
        super().compile(**kw)
        self.contrastive_optimizer, self.probe_optimizer = contrastive_optimizer, probe_optimizer
        self.probe_loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.contrastive_loss_tracker = keras.metrics.Mean(name="c_loss")
        self.contrastive_accuracy = keras.metrics.SparseCategoricalAccuracy(name="c_acc")
        self.probe_loss_tracker = keras.metrics.Mean(name="p_loss")
        self.probe_accuracy = keras.metrics.SparseCategoricalAccuracy(name="p_acc")

    @property
    def metrics(self):
        return [self.contrastive_loss_tracker, self.contrastive_accuracy, self.probe_loss_tracker, self.probe_accuracy]

    def augment(self, x):
        return x + 0.1 * keras.random.normal(ops.shape(x), seed=self.seed)

    def contrastive_loss(self, p1, p2):
        p1, p2 = ops.normalize(p1, axis=1), ops.normalize(p2, axis=1)
        similarities = ops.matmul(p1, ops.transpose(p2)) / self.temperature
        batch_size = ops.shape(p1)[0]
        labels = ops.arange(batch_size)
        self.contrastive_accuracy.update_state(labels, similarities)
        self.contrastive_accuracy.update_state(labels, ops.transpose(similarities))
        l1 = keras.losses.sparse_categorical_crossentropy(labels, similarities, from_logits=True)
        l2 = keras.losses.sparse_categorical_crossentropy(labels, ops.transpose(similarities), from_logits=True)
        return (l1 + l2) / 2

    def train_step(self, data):
        x, y = data
        a, b = self.augment(x), self.augment(x)
        with tf.GradientTape() as tape:
            p1 = self.projection_head(self.encoder(a, training=True), training=True)
            p2 = self.projection_head(self.encoder(b, training=True), training=True)
            loss = self.contrastive_loss(p1, p2)
        variables = self.encoder.trainable_weights + self.projection_head.trainable_weights
        gradients = tape.gradient(loss, variables)
        self.contrastive_optimizer.apply_gradients(zip(gradients, variables))
        self.contrastive_loss_tracker.update_state(loss)
        pre = self.augment(x)
        with tf.GradientTape() as tape:
            features = self.encoder(pre, training=False)
            logits = self.linear_probe(features, training=True)
            probe_loss = self.probe_loss(y, logits)
        gradients = tape.gradient(probe_loss, self.linear_probe.trainable_weights)
        self.probe_optimizer.apply_gradients(zip(gradients, self.linear_probe.trainable_weights))
        self.probe_loss_tracker.update_state(probe_loss)
        self.probe_accuracy.update_state(y, logits)
        return {m.name: m.result() for m in self.metrics}


def simclr():
    m = Contrastive()
    m.compile(keras.optimizers.Adam(0.01), keras.optimizers.Adam(0.01))
    return m, rows(5), labels_of(3)


# --- MoCo: a momentum encoder and a queue of keys


class MoCo(Two):
    def __init__(self):
        super().__init__()
        self.q, self.k = mlp(5, 8, 6, 4), mlp(5, 8, 6, 4)
        self.k.set_weights(self.q.get_weights())
        self.k.trainable = False
        self.queue = keras.Variable(np.random.default_rng(3).normal(size=(16, 4)), trainable=False, dtype="float64")
        self.trackers("loss")

    def train_step(self, data):
        x, x2 = data
        key = ops.stop_gradient(ops.normalize(self.k(x2, training=True), axis=1))
        with tf.GradientTape() as tape:
            query = ops.normalize(self.q(x, training=True), axis=1)
            pos = ops.sum(query * key, axis=1, keepdims=True)
            neg = ops.matmul(query, ops.transpose(self.queue.value))
            logits = ops.concatenate([pos, neg], axis=1) / 0.2
            labels = ops.zeros((ops.shape(x)[0],), dtype="int64")
            loss = ops.mean(keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True))
        g = tape.gradient(loss, self.q.trainable_variables)
        self.optimizer.apply_gradients(zip(g, self.q.trainable_variables))
        for a, b in zip(self.k.variables, self.q.variables):
            a.assign(0.9 * a + 0.1 * b)
        n = ops.shape(x)[0]
        self.queue.assign(ops.concatenate([key, self.queue.value[:-n]], axis=0))
        return self.logs(loss=loss)


def moco():
    m = MoCo()
    m.compile(keras.optimizers.SGD(0.05, 0.9))
    return m, (rows(5), rows(5, seed=1))


# --- Diffusion, with an average of the network


class Diffusion(Two):
    def __init__(self):
        super().__init__()
        self.normalizer = layers.Normalization()
        self.normalizer.adapt(images())
        self.seed_generator = keras.random.SeedGenerator(7)

        def net():
            x, t = keras.Input([8, 8, 1]), keras.Input([1, 1, 1])
            e = layers.Lambda(lambda v: ops.concatenate([ops.sin(v * 2.0), ops.cos(v * 2.0)], axis=3))(t)
            e = layers.UpSampling2D(size=8, interpolation="nearest")(e)
            h = layers.Concatenate()([layers.Conv2D(2, 1)(x), e])
            h = layers.Conv2D(3, 3, padding="same", activation="swish")(h)
            return keras.Model([x, t], layers.Conv2D(1, 1, kernel_initializer="zeros")(h))

        self.network = net()
        self.ema_network = net()
        self.ema_network.set_weights(self.network.get_weights())

    def compile(self, **kw):
        super().compile(**kw)
        self.trackers("n_loss", "i_loss")

    def diffusion_schedule(self, times):
        start, end = ops.cast(ops.arccos(0.95), "float64"), ops.cast(ops.arccos(0.02), "float64")
        angles = start + times * (end - start)
        return ops.sin(angles), ops.cos(angles)

    def denoise(self, noisy, nr, sr, training):
        network = self.network if training else self.ema_network
        pn = network([noisy, nr**2], training=training)
        return pn, (noisy - nr * pn) / sr

    def train_step(self, images):
        if isinstance(images, tuple):
            images = images[0]
        images = self.normalizer(images, training=True)
        n = ops.shape(images)[0]
        noises = keras.random.normal(shape=(n, 8, 8, 1), seed=self.seed_generator)
        times = keras.random.uniform(shape=(n, 1, 1, 1), minval=0.0, maxval=1.0, seed=self.seed_generator)
        nr, sr = self.diffusion_schedule(times)
        noisy = sr * images + nr * noises
        with tf.GradientTape() as tape:
            pn, pi = self.denoise(noisy, nr, sr, training=True)
            noise_loss = self.loss(noises, pn)
            image_loss = self.loss(images, pi)
        g = tape.gradient(noise_loss, self.network.trainable_weights)
        self.optimizer.apply_gradients(zip(g, self.network.trainable_weights))
        for w, e in zip(self.network.weights, self.ema_network.weights):
            e.assign(0.999 * e + (1 - 0.999) * w)
        return self.logs(n_loss=noise_loss, i_loss=image_loss)


def diffusion():
    m = Diffusion()
    m.compile(optimizer=keras.optimizers.AdamW(0.01, weight_decay=1e-4), loss=keras.losses.MeanAbsoluteError())
    return m, images()


# --- VQ-VAE


class VectorQuantizer(layers.Layer):
    def __init__(self, num, dim, beta=0.25):
        super().__init__()
        self.num, self.dim, self.beta = num, dim, beta
        self.embeddings = self.add_weight(
            shape=(dim, num), initializer=keras.initializers.RandomUniform(seed=4), name="vq"
        )

    def call(self, x):
        input_shape = tf.shape(x)
        flat = tf.reshape(x, [-1, self.dim])
        idx = self.codes(flat)
        enc = tf.one_hot(idx, self.num, dtype=x.dtype)
        quantized = tf.reshape(tf.matmul(enc, self.embeddings, transpose_b=True), input_shape)
        commitment = tf.reduce_mean((tf.stop_gradient(quantized) - x) ** 2)
        codebook = tf.reduce_mean((quantized - tf.stop_gradient(x)) ** 2)
        self.add_loss(self.beta * commitment + codebook)
        return x + tf.stop_gradient(quantized - x)

    def codes(self, flat):
        sim = tf.matmul(flat, self.embeddings)
        d = tf.reduce_sum(flat**2, axis=1, keepdims=True) + tf.reduce_sum(self.embeddings**2, axis=0) - 2 * sim
        return tf.argmin(d, axis=1)


class VQVAE(Two):
    def __init__(self):
        super().__init__()
        inp = keras.Input([8, 8, 1])
        h = layers.Conv2D(3, 3, strides=2, padding="same", activation="relu")(inp)
        h = layers.Conv2D(2, 1)(h)
        q = VectorQuantizer(6, 2)(h)
        out = layers.Conv2DTranspose(1, 3, strides=2, padding="same")(
            layers.Conv2D(3, 3, padding="same", activation="relu")(q)
        )
        self.vqvae = keras.Model(inp, out)
        self.train_variance = 0.7
        self.trackers("loss", "r", "vq")

    def train_step(self, x):
        if isinstance(x, tuple):
            x = x[0]
        with tf.GradientTape() as tape:
            rec = self.vqvae(x)
            r = tf.reduce_mean((x - rec) ** 2) / self.train_variance
            total = r + sum(self.vqvae.losses)
        g = tape.gradient(total, self.vqvae.trainable_variables)
        self.optimizer.apply_gradients(zip(g, self.vqvae.trainable_variables))
        return self.logs(loss=total, r=r, vq=sum(self.vqvae.losses))


def vqvae():
    m = VQVAE()
    m.compile(keras.optimizers.Adam(0.01))
    return m, images()


# --- Forward-forward: each layer has an optimizer of its own


class FFDense(layers.Layer):
    def __init__(self, units, **kw):
        super().__init__(**kw)
        self.dense, self.relu = layers.Dense(units), layers.ReLU()
        self.optimizer = keras.optimizers.Adam(0.03)
        self.loss_metric = keras.metrics.Mean()
        self.threshold, self.num_epochs = 1.5, 2

    def build(self, shape):
        self.dense.build(shape)
        self.optimizer.build(self.dense.trainable_weights)

    def call(self, x):
        x_dir = x / (tf.norm(x, ord=2, axis=1, keepdims=True) + 1e-4)
        return self.relu(self.dense(x_dir))

    def forward_forward(self, x_pos, x_neg):
        for _ in range(self.num_epochs):
            with tf.GradientTape() as tape:
                g_pos = tf.reduce_mean(tf.pow(self.call(x_pos), 2), 1)
                g_neg = tf.reduce_mean(tf.pow(self.call(x_neg), 2), 1)
                loss = tf.math.log(1 + tf.math.exp(tf.concat([-g_pos + self.threshold, g_neg - self.threshold], 0)))
                mean_loss = tf.reduce_mean(loss)
                self.loss_metric.update_state([mean_loss])
            g = tape.gradient(mean_loss, self.dense.trainable_weights)
            self.optimizer.apply_gradients(zip(g, self.dense.trainable_weights))
        return tf.stop_gradient(self.call(x_pos)), tf.stop_gradient(self.call(x_neg)), self.loss_metric.result()


class FF(keras.Model):
    def __init__(self):
        super().__init__()
        self.parts = [FFDense(6), FFDense(5)]
        self.parts[0].build((None, 8))
        self.parts[1].build((None, 6))
        self.loss_var = keras.Variable(0.0, trainable=False)
        self.seed = keras.random.SeedGenerator(7)

    def overlay(self, x, y):
        return tf.concat([tf.one_hot(y, 3, dtype=x.dtype), x[:, 3:]], 1)

    def train_step(self, data):
        x, y = data
        wrong = (y + keras.random.randint(tf.shape(y), 1, 3, seed=self.seed, dtype=y.dtype)) % 3
        pos, neg = self.overlay(x, y), self.overlay(x, wrong)
        total = 0.0
        for part in self.parts:
            pos, neg, loss = part.forward_forward(pos, neg)
            total += loss
        return {"loss": total}


def ff():
    m = FF()
    m.compile()
    return m, rows(8), labels_of(3)


# --- A masked autoencoder


class MAE(Two):
    def __init__(self):
        super().__init__()
        self.enc, self.dec = by_token(4, 8, 6), by_token(6, 8, 4)
        self.mask_token = keras.Variable(np.random.default_rng(2).normal(size=(1, 6)), dtype="float64")
        self.seed = keras.random.SeedGenerator(7)
        self.trackers("loss")

    def train_step(self, data):
        patches = data[0] if isinstance(data, tuple) else data
        with tf.GradientTape() as tape:
            n = tf.shape(patches)[0]
            order = tf.argsort(keras.random.uniform((n, 6), seed=self.seed), axis=-1)
            masked, kept = order[:, :4], order[:, 4:]
            visible = self.enc(tf.gather(patches, kept, axis=1, batch_dims=1))
            tokens = tf.repeat(tf.repeat(self.mask_token[None], 4, axis=1), n, axis=0)
            out = self.dec(tf.concat([visible, tokens], axis=1))
            target = tf.gather(patches, masked, axis=1, batch_dims=1)
            loss = self.compute_loss(y=target, y_pred=out[:, 2:])
        v = [self.enc.trainable_variables, self.dec.trainable_variables, [self.mask_token]]
        g = tape.gradient(loss, v)
        pairs = []
        for gs, vs in zip(g, v):
            for a, b in zip(gs, vs):
                pairs.append((a, b))
        self.optimizer.apply_gradients(pairs)
        return self.logs(loss=loss)


def mae():
    m = MAE()
    m.compile(keras.optimizers.AdamW(0.01), loss=keras.losses.MeanSquaredError())
    return m, rows(6, 4)


# --- Captions: two updates of one decoder, by a Python loop


class Caption(Two):
    def __init__(self):
        super().__init__()
        self.cnn, self.encoder = mlp(5, 6, last="relu"), mlp(6, 6, last="relu")
        w, f = keras.Input([None], dtype="int64"), keras.Input([6])
        e = layers.Embedding(9, 6)(w)
        self.decoder = keras.Model(
            [w, f], layers.Dense(9)(layers.Dense(6, "tanh")(e + layers.Lambda(lambda v: v[:, None])(f)))
        )
        self.loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)
        self.trackers("loss", "acc")

    def calculate(self, img, seq, training):
        enc = self.encoder(img, training=training)
        inp, true = seq[:, :-1], seq[:, 1:]
        mask = tf.math.not_equal(true, 0)
        pred = self.decoder([inp, enc], training=training)
        loss = self.loss_fn(true, pred)
        m = tf.cast(mask, loss.dtype)
        loss = tf.reduce_sum(loss * m) / tf.reduce_sum(m)
        acc = tf.logical_and(mask, tf.equal(true, tf.argmax(pred, 2)))
        acc = tf.cast(acc, loss.dtype)
        return loss, tf.reduce_sum(acc) / tf.reduce_sum(m)

    def train_step(self, data):
        img, seq = data
        batch_loss = batch_acc = 0
        img = self.cnn(img)
        for i in range(2):
            with tf.GradientTape() as tape:
                loss, acc = self.calculate(img, seq[:, i, :], True)
                batch_loss += loss
                batch_acc += acc
            v = self.encoder.trainable_variables + self.decoder.trainable_variables
            g = tape.gradient(loss, v)
            self.optimizer.apply_gradients(zip(g, v))
        batch_acc /= 2.0
        return self.logs(loss=batch_loss, acc=batch_acc)


def caption():
    m = Caption()
    m.cnn.trainable = False
    m.compile(keras.optimizers.Adam(0.01))
    return m, rows(5), np.random.default_rng(0).integers(0, 9, (SAMPLES, 2, 5))


# --- AdaMatch: statistics of the predictions of the batch


class AdaMatch(Two):
    def __init__(self):
        super().__init__()
        self.base, self.tau = mlp(5, 8, 6, 3), 0.4
        self.trackers("loss")
        self.seed = keras.random.SeedGenerator(7)

    def train_step(self, data):
        sw, ss, tw, ts, y = data
        cs, combined = tf.concat([sw, ss], 0), tf.concat([sw, ss, tw, ts], 0)
        total_source = tf.shape(cs)[0]
        total_target = tf.shape(tw)[0]
        with tf.GradientTape() as tape:
            logits = self.base(combined, training=True)
            source = logits[:total_source]
            source2 = self.base(cs, training=True)
            lam = keras.random.uniform((total_source, 3), seed=self.seed)
            final = lam * source + (1 - lam) * source2
            p = tf.nn.softmax(final[: tf.shape(sw)[0]])
            pt = tf.nn.softmax(logits[total_source:][:total_target])
            ratio = tf.reduce_mean(p, 0) / tf.reduce_mean(pt, 0)
            pt = pt * ratio
            pt = pt / tf.reduce_sum(pt, 1, keepdims=True)
            c_tau = self.tau * tf.reduce_mean(tf.reduce_max(p, -1), 0)
            mask = tf.reduce_max(pt, -1) >= c_tau
            w = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=tf.concat([y, y], 0), logits=final)
            pseudo = tf.stop_gradient(tf.argmax(pt, -1))
            t = tf.nn.sparse_softmax_cross_entropy_with_logits(
                labels=pseudo, logits=logits[total_source:][total_target:]
            )
            loss = tf.reduce_mean(w) + tf.reduce_mean(t * tf.cast(mask, t.dtype))
        g = tape.gradient(loss, self.base.trainable_variables)
        self.optimizer.apply_gradients(zip(g, self.base.trainable_variables))
        return self.logs(loss=loss)


def adamatch():
    m = AdaMatch()
    m.compile(keras.optimizers.Adam(0.01))
    d = tf.data.Dataset.from_tensor_slices((*tuple(rows(5, seed=i) for i in range(4)), labels_of(3)))
    return m, d.batch(BATCH)


# --- DINO: a centre that follows the teacher


class Dino(Two):
    def __init__(self):
        super().__init__()
        self.student, self.teacher = mlp(5, 8, 6, 4), mlp(5, 8, 6, 4)
        self.center = keras.Variable(np.zeros((1, 4)), trainable=False, dtype="float64")
        self.trackers("loss")

    def train_step(self, data):
        a, b = data
        with tf.GradientTape() as tape:
            t = tf.concat([self.teacher(a), self.teacher(b)], 0)
            s = tf.concat([self.student(b), self.student(a)], 0)
            p = tf.stop_gradient(tf.nn.softmax((t - self.center) / 0.04))
            loss = -tf.reduce_mean(tf.reduce_sum(p * tf.nn.log_softmax(s / 0.1), 1))
        g = tape.gradient(loss, self.student.trainable_variables)
        self.optimizer.apply_gradients(zip(g, self.student.trainable_variables))
        for x, y in zip(self.teacher.variables, self.student.variables):
            x.assign(0.9 * x + 0.1 * y)
        self.center.assign(0.9 * self.center + 0.1 * tf.reduce_mean(t, 0, keepdims=True))
        return self.logs(loss=loss)


def dino():
    m = Dino()
    m.compile(keras.optimizers.Adam(0.01))
    return m, (rows(5), rows(5, seed=1))


# --- A GAN whose augmentation follows the accuracy


class ADA(Two):
    def __init__(self):
        super().__init__()
        self.discriminator, self.generator = disc(), gen(3)
        self.ema_generator = gen(3)
        self.probability = keras.Variable(0.2, trainable=False, dtype="float64")
        self.seed = keras.random.SeedGenerator(7)
        self.trackers("g", "d", "acc")

    def augment(self, x):
        n = tf.shape(x)[0]
        moved = x + 0.1 * keras.random.normal((n, 1, 1, 1), seed=self.seed)
        pick = keras.random.uniform((n, 1, 1, 1), seed=self.seed) < self.probability
        return tf.where(pick, moved, x)

    def compile(self, g, d):
        super().compile()
        self.go, self.do = g, d

    def train_step(self, real):
        real = real[0] if isinstance(real, tuple) else real
        real = self.augment(real)
        n = tf.shape(real)[0]
        with tf.GradientTape(persistent=True) as tape:
            fake = self.generator(keras.random.normal((n, 3), seed=self.seed), training=True)
            fake = self.augment(fake)
            r, f = self.discriminator(real, training=True), self.discriminator(fake, training=True)
            rl, gl = tf.ones((n, 1), "float64"), tf.zeros((n, 1), "float64")
            gloss = keras.losses.binary_crossentropy(rl, f, from_logits=True)
            dloss = keras.losses.binary_crossentropy(tf.concat([rl, gl], 0), tf.concat([r, f], 0), from_logits=True)
            gloss, dloss = tf.reduce_mean(gloss), tf.reduce_mean(dloss)
        gg = tape.gradient(gloss, self.generator.trainable_weights)
        dg = tape.gradient(dloss, self.discriminator.trainable_weights)
        self.go.apply_gradients(zip(gg, self.generator.trainable_weights))
        self.do.apply_gradients(zip(dg, self.discriminator.trainable_weights))
        acc = 0.5 + 0.5 * tf.reduce_mean(tf.sign(r))
        self.probability.assign(tf.clip_by_value(self.probability + (acc - 0.85) / 10, 0.0, 1.0))
        for w, e in zip(self.generator.weights, self.ema_generator.weights):
            e.assign(0.9 * e + 0.1 * w)
        return self.logs(g=gloss, d=dloss, acc=acc)


def ada():
    m = ADA()
    m.compile(keras.optimizers.Adam(0.01), keras.optimizers.Adam(0.01))
    return m, images()


MODELS = {
    "conditional GAN": cgan,
    "WGAN-GP": wgan,
    "SimCLR": simclr,
    "MoCo": moco,
    "diffusion": diffusion,
    "VQ-VAE": vqvae,
    "forward-forward": ff,
    "masked autoencoder": mae,
    "captions": caption,
    "AdaMatch": adamatch,
    "DINO": dino,
    "augmented GAN": ada,
}

COMBINE_SAMPLES = frozenset({"SimCLR", "AdaMatch"})
"""The models whose losses combine samples: they need ``batch_loss=True``."""


def train(name, **options):
    """Train two epochs, whose last batch is short; return the history, the variables, and the pipeline's step."""
    keras.utils.set_random_seed(3)
    model, x, *y = MODELS[name]()
    if isinstance(x, tuple):
        x = tf.data.Dataset.from_tensor_slices(x).batch(BATCH)
    batch_size = None if isinstance(x, tf.data.Dataset) else BATCH
    step = dapple.keras.pipeline(model, **options) if options else None
    history = model.fit(x, *y, epochs=2, batch_size=batch_size, shuffle=False, verbose=0).history
    return history, [variable.numpy() for variable in model.variables], step
