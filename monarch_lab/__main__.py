from monarch_lab.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
