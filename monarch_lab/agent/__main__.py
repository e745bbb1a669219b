import sys

if __name__ == "__main__":
    if sys.argv[1:2] == ["host"]:
        from monarch_lab.agent.host import main as host_main

        sys.exit(host_main(sys.argv[2:]))
    from monarch_lab.agent.main import main

    main()
