"""The command `tinyvllm`, which is `python -m tinyvllm_cli` too. ^C is seen to before anything else is imported."""


def main() -> None:
    """Run the command line of this process and end it."""
    try:
        import os
        import signal

        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored, and stays so
            # No exception: an import can lose or rename one, and there is nothing yet to be left in good order.
            signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    from tinyvllm_cli.cli import main as command

    command()


if __name__ == "__main__":
    main()
