"""Train with the configuration in conf/: `python train.py model=tiny trainer.max_steps=100`."""

from roundpipe_commands import train

if __name__ == "__main__":
    train()
