import os

os.environ["HF_HUB_OFFLINE"] = "1"  # the library reads it once, when it is imported
