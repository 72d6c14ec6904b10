"""Models with random weights, `random:NAME`: a way to try every kind of model without files or network.

    shapes     NAME -> the library's configuration, and how its images are processed
    weights    numbers drawn with a fixed seed, on the device itself
    heads      draft heads, and those that agree with their model (`-echo`)
    words      a tokenizer trained in code, and chat templates

Tiny models write readable nonsense. Models of real shapes are for measuring. Nothing here is read for other models.
"""
